// The C functions of attention.py, and the state of an iteration between them.
#include "attention.h"

#include <algorithm>
#include <deque>
#include <new>
#include <vector>

#include "attention_work.h"
#include "dispatch.h"
#include "team.h"

namespace inflight {
namespace {

// Cost of an iteration below which one thread is faster than a team.
constexpr int64_t worth_a_team = 512;

// By KvKind.
constexpr Versions<const AttentionKernels*> versions[] = {
    {&portable::of_float, INFLIGHT_IF_AVX2(&avx2::of_float), INFLIGHT_IF_AVX512(&avx512::of_float),
     nullptr},
    {&portable::of_bf16, INFLIGHT_IF_AVX2(&avx2::of_bf16), INFLIGHT_IF_AVX512(&avx512::of_bf16),
     nullptr},
    {&portable::of_int8, INFLIGHT_IF_AVX2(&avx2::of_int8), INFLIGHT_IF_AVX512(&avx512::of_int8),
     nullptr},
};
using Attend = decltype(AttentionKernels::attend);
constexpr Attend with_tiles[] = {nullptr, INFLIGHT_IF_AMX(amx::attend_bf16),
                                 INFLIGHT_IF_AMX(amx::attend_int8)};

// Memory that grows and is not kept when it does.
class Buffer {
public:
    ~Buffer() { release(); }

    void* at_least(size_t bytes) {
        if (bytes > bytes_) {
            release();
            bytes_ = bytes + bytes / 2;
            data_ = ::operator new(bytes_, alignment);
        }
        return data_;
    }

private:
    static constexpr std::align_val_t alignment{64};

    void release() {
        if (data_) ::operator delete(data_, alignment);
        data_ = nullptr;
    }

    void* data_ = nullptr;
    size_t bytes_ = 0;
};

class Attention {
public:
    Attention(const KvShape& shape, KvKind kind) : shape_(shape), kind_(kind) {}

    void plan(int64_t num_sequences, int64_t num_tokens, const int32_t* cu_seqlens_q,
              const int32_t* context_lens, const int32_t* block_tables, int64_t table_stride,
              const int64_t* positions, const int64_t* slots) {
        num_tokens_ = num_tokens;
        positions_ = positions;
        slots_ = slots;
        works_.clear();
        sequences_.clear();
        for (int64_t i = 0; i < num_sequences; ++i)
            sequences_.push_back({cu_seqlens_q[i], cu_seqlens_q[i + 1] - cu_seqlens_q[i],
                                  context_lens[i], block_tables + i * table_stride});
    }

    const KvShape& shape() const { return shape_; }

    // Fills in what `in` lacks, and computes the layer.
    void attend(const LayerRules& rules, RowInputs in, void* out, bool out_is_bf16) {
        const int64_t group = rules.num_heads / shape_.num_kv_heads, size = shape_.head_dim;
        const Work& work = work_for(group, rules.window);
        // Tiles read whole tiles of rows, also behind the last row.
        const int64_t rows = num_tokens_ * rules.num_heads + max_item_rows;
        in.query = query_.at_least(rows * size * sizeof(float));
        in.num_tokens = num_tokens_;
        in.positions = positions_;
        in.slots = slots_;
        const int64_t partial_rows = work.num_partials * max_item_rows;
        float* partials = static_cast<float*>(
            partials_.at_least(partial_rows * (size + 2) * sizeof(float)));
        const LayerCall call{shape_,
                             &rules,
                             group,
                             num_tokens_,
                             in.query,
                             in.storage,
                             out,
                             out_is_bf16,
                             partials,
                             partials + partial_rows * size,
                             partials + partial_rows * (size + 1)};
        run(rules, in, call, work);
    }

private:
    const Work& work_for(int64_t group, int64_t window) {
        for (const Work& work : works_)
            if (work.group == group && work.window == window) return work;
        works_.push_back(divide(sequences_, shape_, group, window, team_size()));
        return works_.back();
    }

    bool fits_tiles() const {
        return chosen_isa() >= Isa::amx && shape_.head_dim % 32 == 0 &&
               (kind_ == KvKind::int8 || shape_.tokens_per_block % 32 == 0);
    }

    Attend attend_function(const AttentionKernels& kernels) const {
        const Attend in_tiles = with_tiles[int(kind_)];
        return in_tiles && fits_tiles() ? in_tiles : kernels.attend;
    }

    void run(const LayerRules& rules, const RowInputs& in, const LayerCall& call,
             const Work& work) {
        const AttentionKernels& kernels = *versions[int(kind_)].chosen();
        const Attend attend = attend_function(kernels);
        const int64_t units = num_tokens_ * shape_.num_kv_heads;
        const int team = work.cost < worth_a_team ? 1 : team_size();
        auto* scratch = static_cast<Scratch*>(scratch_.at_least(team * sizeof(Scratch)));
        const int64_t num_items = work.items.size(), num_merges = work.merges.size();
        Pieces rows(units, 2 * team), items(num_items, num_items), merges(num_merges, num_merges);
        with_team(team, [&](int) {
            for (Pieces::Run run; !(run = rows.take()).empty();)
                kernels.write_rows(shape_, rules, in, run.first, run.last);
        });
        with_team(team, [&](int member) {
            for (Pieces::Run run; !(run = items.take()).empty();) {
                // Where all take items of one size in turn, this member comes to that one.
                const int64_t following = run.first + team;
                attend(call, work.items[run.first],
                       following < num_items ? &work.items[following] : nullptr, scratch[member]);
            }
        });
        with_team(num_merges ? team : 1, [&](int) {
            for (Pieces::Run run; !(run = merges.take()).empty();)
                kernels.merge(call, work.merges[run.first]);
        });
    }

    KvShape shape_;
    KvKind kind_;
    int64_t num_tokens_ = 0;
    const int64_t *positions_ = nullptr, *slots_ = nullptr;
    std::vector<Sequence> sequences_;
    std::deque<Work> works_;  // one for each window that layers of the iteration have
    Buffer query_, partials_, scratch_;
};

}  // namespace
}  // namespace inflight

using namespace inflight;

INFLIGHT_API void* inflight_attention_new(int64_t num_kv_heads, int64_t head_dim,
                                          int64_t tokens_per_block, int64_t kind) {
    return new Attention({num_kv_heads, head_dim, tokens_per_block}, KvKind(kind));
}

INFLIGHT_API void inflight_attention_free(void* attention) {
    delete static_cast<Attention*>(attention);
}

// The arrays are read until the next plan.
INFLIGHT_API void inflight_attention_plan(void* attention, int64_t num_sequences,
                                          int64_t num_tokens, const int32_t* cu_seqlens_q,
                                          const int32_t* context_lens, const int32_t* block_tables,
                                          int64_t table_stride, const int64_t* positions,
                                          const int64_t* slots) {
    static_cast<Attention*>(attention)->plan(num_sequences, num_tokens, cu_seqlens_q, context_lens,
                                             block_tables, table_stride, positions, slots);
}

INFLIGHT_API void inflight_attention_attend_heads(void* attention, const LayerRules* rules,
                                                  const Heads* q_k_v, int64_t is_bf16,
                                                  void* storage, void* out, int64_t out_is_bf16) {
    RowInputs in{};
    in.q = q_k_v[0];
    in.k = q_k_v[1];
    in.v = q_k_v[2];
    in.is_bf16 = is_bf16 != 0;
    in.storage = storage;
    static_cast<Attention*>(attention)->attend(*rules, in, out, out_is_bf16 != 0);
}

// qkv: [num_tokens][num_heads + 2 * num_kv_heads][head_dim], the heads of q, then k, then v.
INFLIGHT_API void inflight_attention_attend(void* attention, const LayerRules* rules,
                                            const void* qkv, int64_t is_bf16, void* storage,
                                            void* out, int64_t out_is_bf16) {
    const KvShape& shape = static_cast<Attention*>(attention)->shape();
    const int64_t size = shape.head_dim, bytes = is_bf16 ? 2 : 4;
    const int64_t width = (rules->num_heads + 2 * shape.num_kv_heads) * size;
    const auto heads_from = [&](int64_t head) {
        return Heads{static_cast<const char*>(qkv) + head * size * bytes, width, size};
    };
    const Heads q_k_v[] = {heads_from(0), heads_from(rules->num_heads),
                           heads_from(rules->num_heads + shape.num_kv_heads)};
    inflight_attention_attend_heads(attention, rules, q_k_v, is_bf16, storage, out, out_is_bf16);
}
