// bf16 storage: dot products of pairs (vdpbf16ps), 16 keys or 16 dimensions at a time.
#include <immintrin.h>

#include "attention_expand_avx512.h"
#include "attention_loops.h"
#include "attention_rows.h"

namespace inflight {
namespace avx512 {
namespace {

inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh splat_pair(const bf16* from) {
    return (__m512bh)_mm512_set1_epi32(read<int32_t>(from));
}

struct PairProducts {
    using Query = bf16;
    using Storage = bf16;
    using Weight = bf16;

    static void begin(int) {}
    static void end() {}
    static void stay_awake() {}

    static const Tile<bf16>& readable(const KvShape&, const Tile<bf16>& tile, Scratch&) {
        return tile;
    }

    static void scores(const KvShape& shape, const bf16* query, int rows, const Tile<bf16>& tile,
                       float* scores) {
        in_runs<8>(rows, [&](auto num_rows, int row) {
            // As many sums as registers hold beside the keys: enough to hide the latency.
            constexpr int at_once = num_rows.value > 4 ? 2 : 4;
            in_runs<at_once>(tile.num_groups, [&](auto num_groups, int group) {
                const bool fetch = row == 0 && can_fetch(tile, group + num_groups.value);
                some_scores<num_rows.value, num_groups.value>(
                    shape, query + row * shape.head_dim, tile.keys + group, tile.key_stride,
                    fetch ? tile.next->keys + group : nullptr,
                    scores + row * key_tile + group * key_group);
            });
        });
    }

    // Whether the next tile has that many groups, to be fetched while this one is worked on.
    static bool can_fetch(const Tile<bf16>& tile, int num_groups) {
        return tile.next && num_groups <= tile.next->num_groups;
    }

    template <int num_rows, int num_groups>
    static void some_scores(const KvShape& shape, const bf16* query, const bf16* const* keys,
                            int64_t key_stride, const bf16* const* ahead, float* scores) {
        __m512 sums[num_rows][num_groups] = {};
        for (int64_t i = 0; i < shape.head_dim; i += 2) {
            const int64_t at = i * key_stride;
            __m512bh key[num_groups];
#pragma GCC unroll 8
            for (int g = 0; g < num_groups; ++g) {
                key[g] = load_pairs(keys[g] + at);
                if (ahead) _mm_prefetch(ahead[g] + at, _MM_HINT_T1);
            }
#pragma GCC unroll 8
            for (int row = 0; row < num_rows; ++row) {
                const __m512bh of_row = splat_pair(query + row * shape.head_dim + i);
#pragma GCC unroll 8
                for (int g = 0; g < num_groups; ++g)
                    sums[row][g] = _mm512_dpbf16_ps(sums[row][g], key[g], of_row);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row)
#pragma GCC unroll 8
            for (int g = 0; g < num_groups; ++g)
                _mm512_storeu_ps(scores + row * key_tile + g * key_group, sums[row][g]);
    }

    static void accumulate(const KvShape& shape, const bf16* weights, int rows,
                           const Tile<bf16>& tile, float* sums) {
        in_runs<4>(rows, [&](auto num_rows, int row) {
            in_runs<4>(int(shape.head_dim / lanes), [&](auto num_chunks, int chunk) {
                some_sums<num_rows.value, num_chunks.value>(
                    shape, weights + row * key_tile, tile, chunk * lanes, row == 0,
                    sums + row * shape.head_dim + chunk * lanes);
            });
        });
    }

    template <int num_rows, int num_chunks>
    static void some_sums(const KvShape& shape, const bf16* weights, const Tile<bf16>& tile,
                          int first_dim, bool may_fetch, float* out) {
        __m512 sums[num_rows][num_chunks];
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row)
#pragma GCC unroll 8
            for (int c = 0; c < num_chunks; ++c)
                sums[row][c] = _mm512_loadu_ps(out + row * shape.head_dim + c * lanes);
        for (int key = 0; key < tile.num_keys; key += 2) {
            const int group = key / key_group;
            const int64_t at = key % key_group * shape.head_dim + first_dim * 2;
            const bf16* values = tile.values[group] + at;
            // The last pair may have a key in its lower half alone.
            const __mmask32 there = key + 1 < tile.num_keys ? 0xffffffff : 0x55555555;
            if (may_fetch && can_fetch(tile, group + 1))
#pragma GCC unroll 8
                for (int c = 0; c < num_chunks; ++c)
                    _mm_prefetch(tile.next->values[group] + at + c * lanes * 2, _MM_HINT_T1);
            __m512bh value[num_chunks];
#pragma GCC unroll 8
            for (int c = 0; c < num_chunks; ++c)
                value[c] = (__m512bh)_mm512_maskz_loadu_epi16(there, values + c * lanes * 2);
#pragma GCC unroll 8
            for (int row = 0; row < num_rows; ++row) {
                const __m512bh of_row = splat_pair(weights + row * key_tile + key);
#pragma GCC unroll 8
                for (int c = 0; c < num_chunks; ++c)
                    sums[row][c] = _mm512_dpbf16_ps(sums[row][c], value[c], of_row);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row)
#pragma GCC unroll 8
            for (int c = 0; c < num_chunks; ++c)
                _mm512_storeu_ps(out + row * shape.head_dim + c * lanes, sums[row][c]);
    }
};

// int8 storage, through a copy as bf16.
struct ExpandedPairProducts : PairProducts {
    using Storage = int8_t;

    static Tile<bf16> readable(const KvShape& shape, const Tile<int8_t>& tile, Scratch& scratch) {
        return expanded(shape, tile, scratch, stay_awake);
    }
};

}  // namespace

const AttentionKernels of_float{write_rows<float, float>, attend_item<LoopProducts<float>>,
                                merge_parts};

const AttentionKernels of_bf16{write_rows<bf16, bf16>, attend_item<PairProducts>, merge_parts};

const AttentionKernels of_int8{write_rows<bf16, int8_t>, attend_item<ExpandedPairProducts>,
                               merge_parts};

}  // namespace avx512
}  // namespace inflight
