// Rows of float times weights of float, or of bf16 made float, for sixteen registers of 8 floats.
//
// A panel is multiplied slice by slice along k, each slice by all blocks of rows before the next.
// It comes from memory while the slice before it is multiplied, and the passes over it, of which
// each takes a block's rows and a part of the columns, find it in the first-level cache.
#pragma once

#include "common_vectors.h"
#include "linear.h"
#include "linear_blocks.h"

namespace inflight {
namespace {

// The sums of so many rows and two vectors of columns fit the registers beside what is multiplied:
// of bf16 that is a mask, too.
template <WeightKind kind>
constexpr int most_rows = kind == WeightKind::f32 ? 6 : 5;

// So few rows would wait for their sums: they take all columns in one pass.
constexpr int wide_rows = 2;

// Read between fetching and multiplying it. Measured: 4 and 16 KiB are slower.
constexpr int64_t slice_bytes = 8192;
constexpr int steps_between_fetches = 16;

template <WeightKind kind, int num_rows>
struct FloatBlock {
    static constexpr int vectors = num_rows <= wide_rows ? panel_columns / wide_lanes : 2;
    static constexpr int columns = vectors * wide_lanes;
    static constexpr int64_t vector_bytes = sizeof(wide_float);

    wide_float sums[num_rows][vectors];

    void begin(const float* tile, bool is_first) {
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v)
                sums[r][v] = is_first ? wide_float{} : read<wide_float>(tile + place(r, v));
    }

    void end(float* tile) const {
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) write(tile + place(r, v), sums[r][v]);
    }

    static constexpr int place(int row, int vector) {
        return row * panel_columns + vector * wide_lanes;
    }

    // `x` points at the first row's value of this step along k.
    void add_step(const wide_float (&weights)[vectors], const float* x, int64_t k) {
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sums[r][v] += x[r * k] * weights[v];
    }

    void add_float(const uint8_t* from, const float* x, int64_t k) {
        wide_float weights[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) weights[v] = read<wide_float>(from + v * vector_bytes);
        add_step(weights, x, k);
    }

    void add_pair(const uint8_t* from, const float* x, int64_t k) {
        wide_float weights[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
            weights[v] = (wide_float)(read<wide_bits>(from + v * vector_bytes) << 16);
        add_step(weights, x, k);
        // Read once more: to keep the pairs takes registers that the sums need.
        __asm__("" : "+r"(from));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
            weights[v] = (wide_float)(read<wide_bits>(from + v * vector_bytes) & 0xffff0000);
        add_step(weights, x + 1, k);
    }

    void add_steps(const uint8_t* weights, const float* x, int64_t k) {
        constexpr int steps = kind == WeightKind::f32 ? 1 : 2;
        for (int i = 0; i < steps_between_fetches; i += steps, weights += 4 * panel_columns)
            if constexpr (kind == WeightKind::f32)
                add_float(weights, x + i, k);
            else
                add_pair(weights, x + i, k);
    }
};

template <WeightKind kind>
constexpr int64_t step_bytes = group_bytes(kind) / group_size;

template <WeightKind kind>
void product_by_slices(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    constexpr int64_t most_steps = slice_bytes / step_bytes<kind>;
    const auto* x = reinterpret_cast<const float*>(rows.values);
    const int64_t k = rows.k;
    AheadByShares ahead(panel, num_rows);
    for (int64_t start = 0; start < k; start += most_steps) {
        const int64_t steps = k - start < most_steps ? k - start : most_steps;
        in_blocks<most_rows<kind>>(num_rows, [&](auto count, int64_t first) {
            using Block = FloatBlock<kind, decltype(count)::value>;
            for (int column = 0; column < panel_columns; column += Block::columns) {
                const uint8_t* weights = panel.weights + start * step_bytes<kind> + 4 * column;
                const float* own_x = x + first * k + start;
                float* own_tile = tile + first * panel_columns + column;
                Block block;
                block.begin(own_tile, start == 0);
                for (int64_t i = 0; i < steps; i += steps_between_fetches) {
                    ahead.fetch(decltype(count)::value * Block::columns * steps_between_fetches);
                    block.add_steps(weights + i * step_bytes<kind>, own_x + i, k);
                }
                block.end(own_tile);
            }
        });
    }
}

// Of one row.
template <WeightKind kind>
void float_product_at_once(const Rows& row, const uint8_t* panels, int64_t panel_bytes,
                           float* tiles) {
    const auto* x = reinterpret_cast<const float*>(row.values);
    FloatBlock<kind, 1> blocks[panels_at_once]{};
    for (int64_t i = 0; i < row.k; i += steps_between_fetches, x += steps_between_fetches)
#pragma GCC unroll 4
        for (int p = 0; p < panels_at_once; ++p)
            blocks[p].add_steps(panels + p * panel_bytes + i * step_bytes<kind>, x, row.k);
    for (int p = 0; p < panels_at_once; ++p) blocks[p].end(tiles + p * tile_floats);
}

}  // namespace
}  // namespace inflight
