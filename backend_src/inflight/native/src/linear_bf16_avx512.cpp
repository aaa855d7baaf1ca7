// bf16 rows times bf16 weights, 16 columns and two steps along k an instruction.
#include <immintrin.h>

#include <cstring>

#include "linear.h"
#include "linear_blocks.h"

namespace inflight {
namespace {

constexpr int most_rows = 14;  // 28 sums, two vectors of weights and one of x
constexpr int64_t pair_bytes = 4 * panel_columns;

__m512bh load_weights(const uint8_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

__m512bh splat_pair(const uint8_t* from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

template <int num_rows>
void bf16_block(const uint8_t* x, int64_t k, const uint8_t* panel, float* tile) {
    __m512 left[num_rows], right[num_rows];
#pragma GCC unroll 14
    for (int r = 0; r < num_rows; ++r) left[r] = right[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2, panel += pair_bytes) {
        prefetch_ahead<pair_bytes>(panel);
        const __m512bh left_weights = load_weights(panel), right_weights = load_weights(panel + 64);
#pragma GCC unroll 14
        for (int r = 0; r < num_rows; ++r) {
            const __m512bh pair = splat_pair(x + 2 * (r * k + i));
            left[r] = _mm512_dpbf16_ps(left[r], pair, left_weights);
            right[r] = _mm512_dpbf16_ps(right[r], pair, right_weights);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < num_rows; ++r) {
        _mm512_storeu_ps(tile + r * panel_columns, left[r]);
        _mm512_storeu_ps(tile + r * panel_columns + 16, right[r]);
    }
}

}  // namespace

void bf16_product_avx512(const Rows& rows, int64_t num_rows, const uint8_t* panel, float* tile) {
    in_blocks<most_rows>(num_rows, [&](auto count, int64_t first) {
        const uint8_t* x = rows_from(rows, first).values;
        bf16_block<decltype(count)::value>(x, rows.k, panel, tile + first * panel_columns);
    });
}

}  // namespace inflight
