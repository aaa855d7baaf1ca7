// bf16 rows times bf16 weights, 16 columns and two steps along k an instruction.
#include <immintrin.h>

#include <cstring>

#include "linear.h"
#include "linear_blocks.h"

namespace inflight {
namespace {

constexpr int64_t pair_bytes = 4 * panel_columns;
constexpr int64_t step_bytes = group_bytes(WeightKind::bf16);

__m512bh load_weights(const uint8_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

__m512bh splat_pair(const uint8_t* from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

template <int num_rows, bool by_shares>
void bf16_block(const uint8_t* x, int64_t k, const Panel& panel, AheadByShares& shares,
                float* tile) {
    const uint8_t* weights = panel.weights;
    Ahead ahead(panel);
    __m512 left[num_rows], right[num_rows];
#pragma GCC unroll 14
    for (int r = 0; r < num_rows; ++r) left[r] = right[r] = _mm512_setzero_ps();
    const bool in_parts = !by_shares && ahead.in_parts<step_bytes>();
    for (int64_t group = 0; group < k; group += group_size) {
        if (!by_shares && !in_parts) ahead.fetch<step_bytes>();
        for (int64_t i = 0; i < group_size; i += 2, weights += pair_bytes) {
            if (in_parts) ahead.fetch_part<pair_bytes>(i / 2);
            if constexpr (by_shares) shares.fetch(2 * num_rows * panel_columns);
            const __m512bh left_weights = load_weights(weights);
            const __m512bh right_weights = load_weights(weights + 64);
#pragma GCC unroll 14
            for (int r = 0; r < num_rows; ++r) {
                const __m512bh pair = splat_pair(x + 2 * (r * k + group + i));
                left[r] = _mm512_dpbf16_ps(left[r], pair, left_weights);
                right[r] = _mm512_dpbf16_ps(right[r], pair, right_weights);
            }
        }
        if (in_parts) ahead.advance();
    }
#pragma GCC unroll 14
    for (int r = 0; r < num_rows; ++r) {
        _mm512_storeu_ps(tile + r * panel_columns, left[r]);
        _mm512_storeu_ps(tile + r * panel_columns + 16, right[r]);
    }
}

template <bool by_shares>
void bf16_product(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    AheadByShares shares(panel, num_rows);
    in_blocks<bf16_block_rows_avx512>(num_rows, [&](auto count, int64_t first) {
        const uint8_t* x = rows_from(rows, first).values;
        bf16_block<decltype(count)::value, by_shares>(x, rows.k, first ? again(panel) : panel,
                                                      shares, tile + first * panel_columns);
    });
}

// One row's sums with a panel's columns.
struct Sums {
    __m512 left = _mm512_setzero_ps(), right = _mm512_setzero_ps();

    void add_pair(__m512bh pair, const uint8_t* weights) {
        left = _mm512_dpbf16_ps(left, pair, load_weights(weights));
        right = _mm512_dpbf16_ps(right, pair, load_weights(weights + 64));
    }
    void store(float* tile) const {
        _mm512_storeu_ps(tile, left);
        _mm512_storeu_ps(tile + 16, right);
    }
};

}  // namespace

void bf16_product_at_once_avx512(const Rows& row, const uint8_t* panels, int64_t panel_bytes,
                                 float* tiles) {
    Sums sums[panels_at_once];
    for (int64_t i = 0; i < row.k; i += 2) {
        const __m512bh pair = splat_pair(row.values + 2 * i);
#pragma GCC unroll 4
        for (int p = 0; p < panels_at_once; ++p)
            sums[p].add_pair(pair, panels + p * panel_bytes + i / 2 * pair_bytes);
    }
    for (int p = 0; p < panels_at_once; ++p) sums[p].store(tiles + p * tile_floats);
}

void bf16_product_avx512(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    bf16_product<false>(rows, num_rows, panel, tile);
}

void bf16_product_by_shares_avx512(const Rows& rows, int64_t num_rows, const Panel& panel,
                                   float* tile) {
    bf16_product<true>(rows, num_rows, panel, tile);
}

}  // namespace inflight
