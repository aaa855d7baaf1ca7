// Products with float weights, and with bf16 weights made float, in vectors of the instruction set
// that the including file is compiled for.
#pragma once

#include <cstring>

#include "common_vectors.h"
#include "linear.h"
#include "linear_blocks.h"

namespace inflight {
namespace {

#if defined(__AVX512F__)
constexpr int native_lanes = 16, float_block_rows = 12;
#else
constexpr int native_lanes = 4, float_block_rows = 4;
#endif

constexpr int block_vectors = 2;
constexpr int block_columns = block_vectors * native_lanes;

typedef float native_float __attribute__((vector_size(4 * native_lanes)));
typedef uint32_t native_bits __attribute__((vector_size(4 * native_lanes)));

// One step along k of a block of rows: sums += x * weights.
template <int num_rows>
void add_step(native_float (&sums)[num_rows][block_vectors], const native_float* weights,
              const float* x, int64_t k) {
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < block_vectors; ++v) sums[r][v] += x[r * k] * weights[v];
}

// sums += x * panel for `num_rows` rows and the columns from `column` on.
template <WeightKind kind, int num_rows>
void sum_block(native_float (&sums)[num_rows][block_vectors], const float* x, int64_t k,
               const Panel& panel, int column) {
    constexpr int64_t vector_bytes = sizeof(native_float);
    const uint8_t* weights = panel.weights + 4 * column;
    Ahead ahead(panel);
    if constexpr (kind == WeightKind::f32) {
        for (int64_t i = 0; i < k; ++i, weights += 4 * panel_columns) {
            if (i % group_size == 0) ahead.fetch<group_bytes(kind)>();
            const native_float step[block_vectors] = {
                read<native_float>(weights),
                read<native_float>(weights + vector_bytes)};
            add_step<num_rows>(sums, step, x + i, k);
        }
    } else {
        for (int64_t i = 0; i < k; i += 2, weights += 4 * panel_columns) {
            if (i % group_size == 0) ahead.fetch<group_bytes(kind)>();
            const native_bits pairs[block_vectors] = {
                read<native_bits>(weights),
                read<native_bits>(weights + vector_bytes)};
            const native_float even[block_vectors] = {(native_float)(pairs[0] << 16),
                                                      (native_float)(pairs[1] << 16)};
            const native_float odd[block_vectors] = {(native_float)(pairs[0] & 0xffff0000),
                                                     (native_float)(pairs[1] & 0xffff0000)};
            add_step<num_rows>(sums, even, x + i, k);
            add_step<num_rows>(sums, odd, x + i + 1, k);
        }
    }
}

// Takes rows of float for both kinds of weights.
template <WeightKind kind>
void float_product(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    const float* x = reinterpret_cast<const float*>(rows.values);
    in_blocks<float_block_rows>(num_rows, [&](auto count, int64_t first) {
        constexpr int block_rows = decltype(count)::value;
        for (int column = 0; column < panel_columns; column += block_columns) {
            native_float sums[block_rows][block_vectors] = {};
            sum_block<kind, block_rows>(sums, x + first * rows.k, rows.k,
                                        first || column ? again(panel) : panel, column);
            float* to = tile + first * panel_columns + column;
            for (int r = 0; r < block_rows; ++r)
                memcpy(to + r * panel_columns, sums[r], sizeof sums[r]);
        }
    });
}

}  // namespace
}  // namespace inflight
