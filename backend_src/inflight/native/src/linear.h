// y = x W^T for packed weights: the types that the driver and the kernels share.
//
// W [n, k] is cut into panels of 32 of its rows, which are 32 columns of y; a panel lies whole in
// memory and is read front to back. k is padded to a multiple of 32 with zeros, n likewise.
//
//   f32    [k][32] float
//   bf16   [k/2][32][2] bf16: pairs along k, as VDPBF16PS and the tiles of AMX want them
//   q8_0   k/32 groups, each [8][32][4] signed bytes (fours along k), then 32 half scales
//   q4_0   k/32 groups, each [4][32][4] bytes of two values, then 32 half scales
//   q4_1   the same, then 32 half minima
//
// A byte of q4 holds in its low half the value at (4 * outer + inner) of its group of 32, and in
// its high half the one 16 further on: the order of GGUF. q4_0 means scale * (value - 8), q4_1
// scale * value + minimum, q8_0 scale * value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inflight {

constexpr int panel_columns = 32;
constexpr int group_size = 32;  // values along k that share a scale
constexpr int num_weight_kinds = 5;

// The numbers of both enumerations are those of linear.py.
enum class WeightKind : int { f32, bf16, q8_0, q4_0, q4_1 };
enum class Number : int { f32, bf16 };

// Bytes of 32 columns of one group of 32 along k.
constexpr int64_t group_bytes(WeightKind kind) {
    switch (kind) {
        case WeightKind::f32: return 4096;
        case WeightKind::bf16: return 2048;
        case WeightKind::q8_0: return 1024 + 64;
        case WeightKind::q4_0: return 512 + 64;
        case WeightKind::q4_1: return 512 + 64 + 64;
    }
    return 0;
}

// What a kernel wants the rows of x to be. int8: each group of 32 has its own scale.
enum class Form : int { f32, bf16, int8 };

// Rows of x, k (padded) values each, without gaps. Of int8 alone: a scale, the sum of the values
// and scale * sum for each group; those of one group lie together, a row each:
// [k/32][scale_stride].
struct Rows {
    Form form;
    int64_t k;
    uint8_t* values;
    float* scales;
    float* scaled_sums;
    int32_t* sums;
    int64_t scale_stride;
};

constexpr int64_t value_bytes(Form form) {
    return form == Form::f32 ? 4 : form == Form::bf16 ? 2 : 1;
}

static inline Rows rows_from(const Rows& rows, int64_t first) {
    Rows later = rows;
    later.values += first * rows.k * value_bytes(rows.form);
    if (rows.form != Form::int8) return later;
    later.scales += first;
    later.scaled_sums += first;
    later.sums += first;
    return later;
}

// What a kernel fetches while it computes: so many bytes for each group of 32 along k, from `from`
// to `end`, then from `then`. With few rows memory is what a product waits for, and the processor's
// own fetching ahead stops at every 4 KiB and knows no other panel.
struct Fetching {
    int64_t step;  // 0: nothing
    const uint8_t *from, *end, *then;
};

// A panel as a kernel finds it. Where the route expands, `expanded` has room for it in bf16: the
// call for the first rows fills that while it computes, calls for further rows find it filled.
struct Panel {
    const uint8_t* weights;  // as packed
    uint8_t* expanded;
    bool is_expanded;
    Fetching fetching;
};

// tile [num_rows][32] = the rows times one panel.
using Product = void (*)(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);

// tile [32] of each of `panels_at_once` panels, one after the other = one row times them. Tiles lie
// `tile_floats` apart. A core that reads one panel after the other does not get from memory what it
// can, since the processor fetches ahead in each place that is read by itself.
using ProductAtOnce = void (*)(const Rows& row, const uint8_t* panels, int64_t panel_bytes,
                               float* tiles);

constexpr int64_t most_block_rows = 48;  // whole blocks of registers of all kernels
constexpr int64_t tile_floats = most_block_rows * panel_columns;
constexpr int64_t panels_at_once = 4;

// One way to compute a product.
struct Route {
    Form form;
    Product product;
    int64_t block_rows;  // it is called for at most so many rows, so that the tile stays near
    int64_t row_unit;    // it reads whole multiples of this many rows
    bool expands;        // the panel to bf16; else it takes the panel as it lies
    void (*begin)();     // what a thread calls before its first product and after its last, or null
    void (*end)();
    bool by_shares = false;  // it goes through a panel many times and fetches all the while
    int64_t lead = 4096;     // it fetches so many bytes in front of what it reads
    ProductAtOnce at_once = nullptr;  // of a single row, or null
};

// A way that reads the panel as it lies.
constexpr Route direct(Form form, Product product, bool by_shares = false) {
    Route route{form, product, most_block_rows, 1, false, nullptr, nullptr};
    route.by_shares = by_shares;
    return route;
}

// What becomes of a tile.
enum class Finish : int { store, add, silu_mul, gelu_tanh_mul, argmax };

struct Output {
    Finish finish;
    Number number;
    void* data;         // [rows][columns]; `add` adds to float
    int64_t columns;
    const float* bias;  // by column of the panels, or null
    float* best;        // [rows], of argmax as the next
    int32_t* best_ids;
};

// Where a tile lies in y: its rows, and its 32 columns as the panel that they come from. The
// ones with `mul` take two tiles, of a gate's panel and of the next, tile_floats apart, and
// give the columns of half the panel's number.
struct Place {
    int64_t first_row, num_rows, panel;
};

// Writes the first of `rows` from one row of x, `k` values of `number`; zeros from k to rows.k.
using PrepareRow = void (*)(Number number, const void* x, int64_t k, const Rows& rows);

using FinishTile = void (*)(const Output& output, const Place& place, const float* tile);

struct LinearKernels {
    PrepareRow prepare;
    FinishTile finish;
    Route few[num_weight_kinds];   // by WeightKind: the route of fewer than some_from rows
    Route some[num_weight_kinds];  // of fewer than many_from rows
    Route many[num_weight_kinds];
    int64_t some_from[num_weight_kinds], many_from[num_weight_kinds];
};

extern const LinearKernels linear_kernels_portable, linear_kernels_avx2, linear_kernels_avx512,
    linear_kernels_amx;

constexpr int bf16_block_rows_avx512 = 14;  // 28 sums, two vectors of weights and one of x

void bf16_product_avx512(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void bf16_product_by_shares_avx512(const Rows& rows, int64_t num_rows, const Panel& panel,
                                   float* tile);
void bf16_product_at_once_avx512(const Rows& row, const uint8_t* panels, int64_t panel_bytes,
                                 float* tiles);
void bf16_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void q8_0_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void q4_0_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void q4_1_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void begin_bf16_tiles_amx();
void end_tiles_amx();
void q8_0_int8_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile);
void begin_int8_tiles_amx();

}  // namespace inflight
