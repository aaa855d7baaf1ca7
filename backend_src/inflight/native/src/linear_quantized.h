// Products of int8 rows with quantized weights: whole numbers inside a group of 32 along k, float
// across groups.
//
// `Ops` is an instruction set:
//   Floats, Ints           vectors of `lanes` float and int32
//   block_rows, vectors    rows and vectors of columns whose products are computed together, at most
//   q8_offset              what load_q8 adds to each weight; taken out again by sums of x
//   load_bytes, load_q8, low_halves, high_halves, splat, splat_float
//   dot_q8, dot_q4(sums, weights, x)    four weights of each lane times the four values in `x`
//   start_q4, whole_q4     before the first and after the last dot_q4 of a group, whose sums may
//                          be in halves of their lanes meanwhile; both are given what they start at
//   multiply_add(a, b, c)  a * b + c, with to_float and load_halves (fp16) for its operands
#pragma once

#include <cstring>

#include "linear.h"
#include "linear_blocks.h"

namespace inflight {
namespace {

template <class Ops, WeightKind kind, int num_rows>
struct QuantizedBlock {
    using Ints = typename Ops::Ints;
    using Floats = typename Ops::Floats;
    static constexpr int vectors = Ops::vectors;
    static constexpr int columns = vectors * Ops::lanes;
    static constexpr int quad_bytes = 4 * panel_columns;
    static constexpr bool is_q8 = kind == WeightKind::q8_0;
    static constexpr int offset = is_q8 ? Ops::q8_offset : kind == WeightKind::q4_0 ? 8 : 0;
    static constexpr int value_bytes = is_q8 ? 1024 : 512;

    Floats totals[num_rows][vectors];

    // x points at the group's 32 values of the first row, `weights` at the block's columns.
    static void dot_group(Ints (&sums)[num_rows][vectors], const uint8_t* weights,
                          const uint8_t* x, int64_t k) {
#pragma GCC unroll 8
        for (int step = 0; step < value_bytes / quad_bytes; ++step) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const uint8_t* from = weights + step * quad_bytes + 4 * v * Ops::lanes;
                const Ints bytes = is_q8 ? Ops::load_q8(from) : Ops::load_bytes(from);
#pragma GCC unroll 8
                for (int r = 0; r < num_rows; ++r) {
                    const uint8_t* quad = x + r * k + 4 * step;
                    Ints& sum = sums[r][v];
                    if constexpr (is_q8) {
                        sum = Ops::dot_q8(sum, bytes, load_quad(quad));
                    } else {
                        sum = Ops::dot_q4(sum, Ops::low_halves(bytes), load_quad(quad));
                        sum = Ops::dot_q4(sum, Ops::high_halves(bytes), load_quad(quad + 16));
                    }
                }
            }
        }
    }

    void add_group(const Rows& rows, int64_t group, const uint8_t* weights, int column) {
        const int64_t scales_at = group * rows.scale_stride;
        Ints sums[num_rows][vectors];
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) {
            const int32_t start = start_of(rows.sums[scales_at + r]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v)
                sums[r][v] = is_q8 ? Ops::splat(start) : Ops::start_q4(start);
        }
        dot_group(sums, weights + 4 * column, rows.values + group * group_size, rows.k);
        const uint8_t* scales = weights + value_bytes + 2 * column;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const Floats scale = Ops::load_halves(scales + 2 * v * Ops::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; ++r) {
                const Floats both = scale * Ops::splat_float(rows.scales[scales_at + r]);
                const Ints whole =
                    is_q8 ? sums[r][v]
                          : Ops::whole_q4(sums[r][v], start_of(rows.sums[scales_at + r]));
                totals[r][v] = Ops::multiply_add(Ops::to_float(whole), both, totals[r][v]);
            }
            if constexpr (kind == WeightKind::q4_1) {
                const Floats minimum = Ops::load_halves(scales + 64 + 2 * v * Ops::lanes);
#pragma GCC unroll 8
                for (int r = 0; r < num_rows; ++r) {
                    const Floats sum = Ops::splat_float(rows.scaled_sums[scales_at + r]);
                    totals[r][v] = Ops::multiply_add(minimum, sum, totals[r][v]);
                }
            }
        }
    }

    static int32_t start_of(int32_t sum_of_x) { return -offset * sum_of_x; }

    static int32_t load_quad(const uint8_t* from) {
        int32_t quad;
        memcpy(&quad, from, sizeof quad);
        return quad;
    }
};

// `by_shares`: for more rows than one block, of routes that say the same of themselves.
template <class Ops, WeightKind kind, bool by_shares = false>
void quantized_product(const Rows& rows, int64_t num_rows, const Panel& panel, float* tile) {
    const int64_t groups = rows.k / group_size;
    AheadByShares shares(panel, num_rows);
    in_blocks<Ops::block_rows>(num_rows, [&](auto count, int64_t first) {
        constexpr int block_rows = decltype(count)::value;
        using Block = QuantizedBlock<Ops, kind, block_rows>;
        const Rows block_of_rows = rows_from(rows, first);
        for (int column = 0; column < panel_columns; column += Block::columns) {
            Block block{};
            const uint8_t* weights = panel.weights;
            const bool read_before = first > 0 || column > 0;
            Ahead ahead(read_before ? again(panel) : panel);
            for (int64_t g = 0; g < groups; ++g, weights += group_bytes(kind)) {
                if constexpr (by_shares)
                    shares.fetch(block_rows * Block::columns * group_size);
                else
                    ahead.fetch<group_bytes(kind)>();
                block.add_group(block_of_rows, g, weights, column);
            }
            float* to = tile + first * panel_columns + column;
            for (int r = 0; r < block_rows; ++r)
                memcpy(to + r * panel_columns, block.totals[r], sizeof block.totals[r]);
        }
    });
}

// Of one row.
template <class Ops, WeightKind kind>
void quantized_product_at_once(const Rows& row, const uint8_t* panels, int64_t panel_bytes,
                               float* tiles) {
    using Block = QuantizedBlock<Ops, kind, 1>;
    static_assert(Block::columns == panel_columns);
    Block blocks[panels_at_once]{};
    for (int64_t g = 0; g < row.k / group_size; ++g)
        for (int p = 0; p < panels_at_once; ++p)
            blocks[p].add_group(row, g, panels + p * panel_bytes + g * group_bytes(kind), 0);
    for (int p = 0; p < panels_at_once; ++p)
        memcpy(tiles + p * tile_floats, blocks[p].totals[0], sizeof blocks[p].totals[0]);
}

}  // namespace
}  // namespace inflight
