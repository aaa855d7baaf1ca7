// bf16 rows times bf16 weights in the tiles of AMX: 32 rows by 32 columns at a time, in four tiles
// of sums that each take a tile of rows (16 by 32 of k) and one of weights (32 of k by 16).
#include <immintrin.h>

#include "linear.h"
#include "linear_blocks.h"
#include "linear_tiles.h"

namespace inflight {
namespace {

constexpr int64_t tile_row_bytes = 64;
constexpr int64_t panel_stride = 4 * panel_columns;  // also that of the sums
constexpr int64_t step_bytes = group_bytes(WeightKind::bf16);

constexpr TileConfig config = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Tiles 0 and 1 are sums of the upper 16 rows, 2 and 3 of the lower; 4 and 5 the rows of x, which
// are loaded so that they do not drive the panel out of the first-level cache; 6 and 7 the weights.
template <bool has_lower>
void amx_block(const uint8_t* x, int64_t k, const Panel& panel, float* tile) {
    const uint8_t* weights = panel.expanded ? panel.expanded : panel.weights;
    Ahead ahead(panel);
    const int64_t x_stride = 2 * k;
    const uint8_t* lower_x = x + tile_rows * x_stride;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (has_lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < k / 32; ++step, weights += step_bytes) {
        ahead.fetch<step_bytes>();
        _tile_stream_loadd(4, x + step * tile_row_bytes, x_stride);
        _tile_loadd(6, weights, panel_stride);
        _tile_loadd(7, weights + tile_row_bytes, panel_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (has_lower) {
            _tile_stream_loadd(5, lower_x + step * tile_row_bytes, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* lower_tile = tile + tile_rows * panel_columns;
    _tile_stored(0, tile, panel_stride);
    _tile_stored(1, tile + tile_rows, panel_stride);
    if constexpr (has_lower) {
        _tile_stored(2, lower_tile, panel_stride);
        _tile_stored(3, lower_tile + tile_rows, panel_stride);
    }
}

}  // namespace

void begin_bf16_tiles_amx() { _tile_loadconfig(&config); }

void end_tiles_amx() { _tile_release(); }

void bf16_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    if (num_rows > tile_rows)
        amx_block<true>(rows.values, rows.k, panel, tile);
    else
        amx_block<false>(rows.values, rows.k, panel, tile);
}

}  // namespace inflight
