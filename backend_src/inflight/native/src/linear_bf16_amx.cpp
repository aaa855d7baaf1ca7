// bf16 rows times bf16 weights in the tiles of AMX: 32 rows by 32 columns at a time, in four tiles
// of sums that each take a tile of rows (16 by 32 of k) and one of weights (32 of k by 16).
#include <immintrin.h>

#include "linear.h"

namespace inflight {
namespace {

constexpr int tile_rows = 16;
constexpr int64_t tile_row_bytes = 64;
constexpr int64_t sums_stride = 4 * panel_columns, weights_stride = 4 * panel_columns;
constexpr int64_t step_bytes = group_bytes(WeightKind::bf16);

// The operand of LDTILECFG. Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower; 4 and 5
// the rows of x, 6 and 7 the weights.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

void configure(int upper, int lower) {
    const int rows[8] = {upper, upper, lower, lower, upper, lower, tile_rows, tile_rows};
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = rows[i] ? tile_row_bytes : 0;
        config.rows[i] = uint8_t(rows[i]);
    }
    _tile_loadconfig(&config);
}

template <bool has_lower>
void amx_block(const uint8_t* x, int64_t k, const uint8_t* panel, float* tile) {
    const int64_t x_stride = 2 * k;
    const uint8_t* lower_x = x + tile_rows * x_stride;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (has_lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < k / 32; ++step, panel += step_bytes) {
        _tile_loadd(4, x + step * tile_row_bytes, x_stride);
        _tile_loadd(6, panel, weights_stride);
        _tile_loadd(7, panel + tile_row_bytes, weights_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (has_lower) {
            _tile_loadd(5, lower_x + step * tile_row_bytes, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* lower_tile = tile + tile_rows * panel_columns;
    _tile_stored(0, tile, sums_stride);
    _tile_stored(1, tile + 16, sums_stride);
    if constexpr (has_lower) {
        _tile_stored(2, lower_tile, sums_stride);
        _tile_stored(3, lower_tile + 16, sums_stride);
    }
}

}  // namespace

void bf16_product_amx(const Rows& rows, int64_t num_rows, const uint8_t* panel, float* tile) {
    constexpr int64_t block_rows = 2 * tile_rows;
    const int64_t whole = num_rows / block_rows * block_rows;
    if (whole > 0) configure(tile_rows, tile_rows);
    for (int64_t row = 0; row < whole; row += block_rows)
        amx_block<true>(rows_from(rows, row).values, rows.k, panel, tile + row * panel_columns);

    const int rest = int(num_rows - whole);
    const uint8_t* x = rows_from(rows, whole).values;
    if (rest > tile_rows) {
        configure(tile_rows, rest - tile_rows);
        amx_block<true>(x, rows.k, panel, tile + whole * panel_columns);
    } else if (rest > 0) {
        configure(rest, 0);
        amx_block<false>(x, rows.k, panel, tile + whole * panel_columns);
    }
    _tile_release();
}

}  // namespace inflight
