// Paged attention over the packed rows of an iteration: the data that its parts share.
//
// KV storage of a layer is [num_blocks][num_kv_heads][2] panels, K and then V, of head_dim *
// tokens_per_block elements. Elements of bf16 lie in pairs, as the dot-product instructions take
// them: K [head_dim / 2][tokens_per_block][2], V [tokens_per_block / 2][head_dim][2]. Elements of
// float and int8 lie as K [head_dim][tokens_per_block], V [tokens_per_block][head_dim].
//
// An int8 element is a whole number in -127 .. 127 and stands for so many times the scale of its
// token, KV head and panel. The float scales of a panel, one for each token, lie behind its
// elements. With a scale for each token, one that is appended changes nothing that is stored.
//
// The query heads that read one KV head are folded into rows: row r of a sequence is head r % group
// of its query r / group. Rows of all sequences follow each other in the query buffer,
// [num_kv_heads][num_tokens * group][head_dim].
#pragma once

#include <cstddef>
#include <cstdint>

namespace inflight {

constexpr int max_item_rows = 64;
constexpr int strip_rows = 16;  // rows that are multiplied at a time
constexpr int max_head_dim = 512;
constexpr int key_tile = 64;   // keys whose scores become weights at a time
constexpr int key_group = 16;  // keys that lie side by side in every block: a vector of scores

enum class KvKind : int64_t { float32 = 0, bf16 = 1, int8 = 2 };  // the numbers of attention.py

struct KvShape {
    int64_t num_kv_heads, head_dim, tokens_per_block;
};

template <class Storage>
constexpr bool is_scaled = sizeof(Storage) == 1;

// Dimensions of K, or keys of V, that lie next to each other.
template <class Storage>
constexpr int pair_size = sizeof(Storage) == 2 ? 2 : 1;

// The elements of one head of one block. Its V panel, `is_value`, follows its K panel.
template <class Storage>
static inline Storage* panel_of(const KvShape& shape, void* storage, int64_t block, int64_t head,
                                bool is_value) {
    const int64_t bytes = shape.tokens_per_block * (shape.head_dim * int64_t(sizeof(Storage)) +
                                                    (is_scaled<Storage> ? sizeof(float) : 0));
    const int64_t panel = (block * shape.num_kv_heads + head) * 2 + is_value;
    return reinterpret_cast<Storage*>(static_cast<char*>(storage) + panel * bytes);
}

static inline float* scales_of(const KvShape& shape, int8_t* panel) {
    return reinterpret_cast<float*>(panel + shape.head_dim * shape.tokens_per_block);
}

// What one sequence brings to the iteration.
struct Sequence {
    int64_t first_token;  // its tokens are first_token .. first_token + num_queries - 1
    int64_t num_queries;
    int64_t context_length;  // they are the last of that many tokens
    const int32_t* blocks;
};

// Rows of one sequence against a range of its keys, for one KV head: what a thread does at a time.
struct WorkItem {
    const Sequence* sequence;
    int32_t kv_head;
    int32_t first_row, num_rows;  // num_rows <= max_item_rows
    int64_t key_begin, key_end;   // key_begin starts a block, or is a multiple of key_tile
    bool is_part;                 // others have the rest of the range: the result is a partial one
    int64_t partial;              // which, for a part
};

// Parts of one range of rows, to be merged when all are done.
struct Merge {
    const Sequence* sequence;
    int32_t kv_head, first_row, num_rows;
    int64_t first_partial, num_partials;
};

// How a layer attends. Made once by attention.py, which mirrors the fields; AttentionRules of
// model/attention.py says how scores become weights.
struct LayerRules {
    int64_t num_heads;
    int64_t window;  // 0: none
    int64_t rotary_dim;
    int64_t norm_spans_heads;  // over all heads of the row; else over each alone
    const float* sinks;        // [num_heads], or null
    const float* cos_sin;      // [max_position][rotary_dim], cosines first; null: no rope
    const float* q_norm;       // weights of an RMSNorm before rope, or null
    const float* k_norm;
    float scale;
    float softcap;  // 0: none
    float norm_epsilon, norm_offset;
};

// A tensor of heads: that of token t and head h starts at data + t * row_stride + h * head_stride.
struct Heads {
    const void* data;
    int64_t row_stride, head_stride;  // in elements
};

struct RowInputs {
    Heads q, k, v;
    bool is_bf16;
    int64_t num_tokens;
    const int64_t *positions, *slots;  // of each token
    void* query;                       // the query buffer
    void* storage;                     // of this layer
};

// What one thread has to know of a layer in an iteration.
struct LayerCall {
    KvShape shape;
    const LayerRules* rules;
    int64_t group;  // query heads per KV head
    int64_t num_tokens;
    const void* query;
    void* storage;
    void* out;  // [num_tokens][num_heads * head_dim]
    bool out_is_bf16;
    // Results of parts: [partial][max_item_rows] rows of head_dim, tops and totals.
    float *partial_sums, *partial_tops, *partial_totals;
};

// Memory of one thread.
struct Scratch {
    alignas(64) float scores[strip_rows * key_tile];
    alignas(64) uint16_t weights[strip_rows * key_tile];
    alignas(64) float sums[max_item_rows * max_head_dim];  // unnormalized results, rows of head_dim
    alignas(64) float totals[max_item_rows][16];           // of weights, in 16 separate sums
    alignas(64) float tops[max_item_rows];  // what weights are relative to, times log2(e)
    // A copy of a tile's keys and values, for products that cannot take them as they are stored.
    alignas(64) uint16_t keys[key_tile * max_head_dim], values[key_tile * max_head_dim];
    alignas(64) float key_scales[key_tile], value_scales[key_tile];
};

// One version of everything that depends on the instruction set.
struct AttentionKernels {
    // Norm, rope and storing of the (token, KV head) units begin .. end, token by token.
    void (*write_rows)(const KvShape&, const LayerRules&, const RowInputs&, int64_t begin,
                       int64_t end);
    // An item; also the one that is likely to follow, or null: its memory may be asked for early.
    void (*attend)(const LayerCall&, const WorkItem&, const WorkItem* following, Scratch&);
    void (*merge)(const LayerCall&, const Merge&);
};

#define INFLIGHT_DECLARE_ATTENTION(isa)     \
    namespace isa {                         \
    extern const AttentionKernels of_float; \
    extern const AttentionKernels of_bf16;  \
    extern const AttentionKernels of_int8;  \
    }
INFLIGHT_DECLARE_ATTENTION(portable)
INFLIGHT_DECLARE_ATTENTION(avx2)
INFLIGHT_DECLARE_ATTENTION(avx512)
#undef INFLIGHT_DECLARE_ATTENTION

namespace amx {
// In place of those of avx512. head_dim is a multiple of 32, and with bf16 tokens_per_block is too.
void attend_bf16(const LayerCall&, const WorkItem&, const WorkItem*, Scratch&);
void attend_int8(const LayerCall&, const WorkItem&, const WorkItem*, Scratch&);
}

}  // namespace inflight
