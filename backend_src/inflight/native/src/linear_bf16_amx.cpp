// bf16 rows times weights of bf16, or quantized ones expanded to it, in the tiles of AMX: 32 rows
// by 32 columns at a time, in four tiles of sums that each take a tile of rows (16 by 32 of k) and
// one of weights (32 of k by 16).
//
// To expand a group takes the vector units twice as long as the tiles take for its product with 32
// rows. To expand one while another is multiplied makes 32 rows 1.4 to 1.8 times as fast as to
// expand the whole panel first. Only the first block of rows has to.
#include <immintrin.h>

#include "linear.h"
#include "linear_blocks.h"
#include "linear_expand.h"
#include "linear_tiles.h"

namespace inflight {
namespace {

constexpr int64_t tile_row_bytes = 64;
constexpr int64_t panel_stride = 4 * panel_columns;  // also that of the sums
constexpr int64_t step_bytes = group_bytes(WeightKind::bf16);

constexpr TileConfig config = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Where a kernel reads the groups of a panel.
template <WeightKind kind>
class Groups {
public:
    Groups(const Panel& panel, int64_t num_groups)
        : is_expanded_(panel.is_expanded), packed_(panel.weights), expanded_(panel.expanded),
          next_(kind == WeightKind::bf16 ? panel.weights : panel.expanded), left_(num_groups) {
        for (int i = 0; i < lead; ++i) expand_one();
    }

    // Groups that are expanded before they are needed. Measured: 4 are slower.
    static constexpr int lead = 2;

    const uint8_t* next() {
        expand_one();
        const uint8_t* group = next_;
        next_ += step_bytes;
        return group;
    }

private:
    void expand_one() {
        if constexpr (kind != WeightKind::bf16) {
            if (is_expanded_ || left_ == 0) return;
            expand_group<kind>(packed_, expanded_);
            // GCC's intrinsics do not say that a tile is loaded from memory: no store may sink.
            __asm__ volatile("" ::: "memory");
            packed_ += group_bytes(kind);
            expanded_ += step_bytes;
            --left_;
        }
    }

    const bool is_expanded_;
    const uint8_t* packed_;
    uint8_t* expanded_;
    const uint8_t* next_;
    int64_t left_;
};

// Tiles 0 and 1 are sums of the upper 16 rows, 2 and 3 of the lower; 4 and 5 the rows of x, which
// are loaded so that they do not drive the panel out of the first-level cache; 6 the weights, 16
// columns and then the others. A register of its own for those, with all loads before all products,
// takes up to 1.2 times as long (docs/performance.md).
template <WeightKind kind, bool has_lower>
void amx_block(const uint8_t* x, int64_t k, const Panel& panel, float* tile) {
    const int64_t steps = k / group_size, x_stride = 2 * k;
    const uint8_t* lower_x = x + tile_rows * x_stride;
    Groups<kind> groups(panel, steps);
    Ahead ahead(panel);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (has_lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        ahead.fetch<group_bytes(kind)>();
        const uint8_t* weights = groups.next();
        _tile_stream_loadd(4, x + step * tile_row_bytes, x_stride);
        if constexpr (has_lower) _tile_stream_loadd(5, lower_x + step * tile_row_bytes, x_stride);
        _tile_loadd(6, weights, panel_stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (has_lower) _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, weights + tile_row_bytes, panel_stride);
        _tile_dpbf16ps(1, 4, 6);
        if constexpr (has_lower) _tile_dpbf16ps(3, 5, 6);
    }
    float* lower_tile = tile + tile_rows * panel_columns;
    _tile_stored(0, tile, panel_stride);
    _tile_stored(1, tile + tile_rows, panel_stride);
    if constexpr (has_lower) {
        _tile_stored(2, lower_tile, panel_stride);
        _tile_stored(3, lower_tile + tile_rows, panel_stride);
    }
}

template <WeightKind kind>
void product(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    if (num_rows > tile_rows)
        amx_block<kind, true>(rows.values, rows.k, panel, tile);
    else
        amx_block<kind, false>(rows.values, rows.k, panel, tile);
}

}  // namespace

void begin_bf16_tiles_amx() { _tile_loadconfig(&config); }

void end_tiles_amx() { _tile_release(); }

void bf16_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    product<WeightKind::bf16>(rows, num_rows, panel, tile);
}

void q8_0_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    product<WeightKind::q8_0>(rows, num_rows, panel, tile);
}

void q4_0_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    product<WeightKind::q4_0>(rows, num_rows, panel, tile);
}

void q4_1_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    product<WeightKind::q4_1>(rows, num_rows, panel, tile);
}

}  // namespace inflight
