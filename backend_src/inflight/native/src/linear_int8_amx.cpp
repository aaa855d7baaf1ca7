// int8 rows times weights of q8_0 in the tiles of AMX: 16 rows by 16 columns and a group of 32
// along k at a time. The whole sums leave the tile for memory and come back to be scaled and added
// up; the steps and their order are those of linear_quantized.h, so the results are too, bit for
// bit.
#include <immintrin.h>

#include "linear.h"
#include "linear_blocks.h"
#include "linear_tiles.h"

namespace inflight {
namespace {

constexpr int vector_columns = 16;
constexpr int64_t panel_stride = 4 * panel_columns, value_bytes_of_group = 1024;
constexpr int64_t packed_group_bytes = group_bytes(WeightKind::q8_0);
constexpr int64_t sums_stride = 4 * vector_columns;

// Tile 0 holds sums, 4 a group of the rows (16 by 32 bytes), 6 one of the weights: 8 fours along k
// by 16 columns.
constexpr TileConfig config = {1, 0, {}, {64, 0, 0, 0, 32, 0, 64}, {16, 0, 0, 0, 16, 0, 8}};

__m512 load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// What a group of the rows and of 16 columns consists of, and the way to the next group. Pointers
// that move on, not sums of a base and an index: with an index the processor splits each
// instruction that reads memory in two.
struct Group {
    const uint8_t *x, *weights, *halves;  // halves: scales of the columns
    const float* scales;                  // of each row
    const int64_t x_stride, scale_stride;

    Group(const Rows& rows, const Panel& panel, int column)
        : x(rows.values), weights(panel.weights + 4 * column),
          halves(panel.weights + value_bytes_of_group + 2 * column), scales(rows.scales),
          x_stride(rows.k), scale_stride(rows.scale_stride) {}

    void next_values() {
        x += group_size;
        weights += packed_group_bytes;
    }

    void next_scales() {
        halves += packed_group_bytes;
        scales += scale_stride;
    }
};

// int32[16][16]: the sums of one group.
struct alignas(64) Sums {
    int32_t of[tile_rows][vector_columns];

    void compute(const Group& group) {
        _tile_zero(0);
        _tile_loadd(4, group.x, group.x_stride);
        _tile_loadd(6, group.weights, panel_stride);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, of, sums_stride);
    }
};

template <int num_rows>
void add_scaled(__m512 (&totals)[num_rows], const Sums& sums, const Group& group) {
    const __m512 scale = load_halves(group.halves);
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; ++r) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(group.scales[r]));
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512(sums.of[r]));
        totals[r] = _mm512_fmadd_ps(whole, both, totals[r]);
    }
}

// The sums of the next group are on their way while those of this one are scaled.
template <int num_rows>
void tile_of_columns(const Rows& rows, const Panel& panel, int column, float* tile) {
    const int64_t groups = rows.k / group_size;
    Ahead ahead(column ? again(panel) : panel);
    Group group(rows, panel, column);
    Sums memory[2];
    Sums *sums = &memory[0], *next_sums = &memory[1];
    __m512 totals[num_rows];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; ++r) totals[r] = _mm512_setzero_ps();
    sums->compute(group);
    for (int64_t left = groups; left > 0; --left) {
        ahead.fetch<packed_group_bytes>();
        group.next_values();
        if (left > 1) next_sums->compute(group);
        add_scaled<num_rows>(totals, *sums, group);
        group.next_scales();
        Sums* const done = sums;
        sums = next_sums;
        next_sums = done;
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; ++r)
        _mm512_storeu_ps(tile + r * panel_columns + column, totals[r]);
}

}  // namespace

void begin_int8_tiles_amx() { _tile_loadconfig(&config); }

void q8_0_int8_product_amx(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    with_count<tile_rows>(int(num_rows), [&](auto count) {
        for (int column = 0; column < panel_columns; column += vector_columns)
            tile_of_columns<decltype(count)::value>(rows, panel, column, tile);
    });
}

}  // namespace inflight
