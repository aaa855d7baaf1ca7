// The products of attention_flash.h in vector arithmetic that every machine has.
#pragma once

#include "attention_flash.h"

namespace inflight {
namespace {

template <int n>
struct Count {
    static constexpr int value = n;
};

// Calls body(Count<n>, first) for consecutive runs of at most `most` things.
template <int most, class Body>
void in_runs(int count, const Body& body) {
    int first = 0;
    for (; first + most <= count; first += most) body(Count<most>{}, first);
    if constexpr (most > 1) {
        if (first < count)
            in_runs<most / 2>(count - first, [&](auto n, int at) { body(n, first + at); });
    }
}

// Two neighbouring dimensions (of K) or keys (of V) for 16 keys or dimensions; with float storage
// the first alone.
struct Pair {
    f32x16 first, second;
};

inline Pair load_pair(const bf16* from) {
    const u32x16 both = read<u32x16>(from);
    return {(f32x16)(both << 16), (f32x16)(both & 0xffff0000u)};
}

inline Pair load_pair(const float* from) { return {load(from), f32x16{}}; }

// row_block * groups (or chunks) vectors are summed up in registers.
template <class StorageType, int row_block, int column_block>
struct LoopProducts {
    using Query = float;
    using Storage = StorageType;
    using Weight = float;
    static constexpr int group_multiple = 1;
    static constexpr int pair = pair_size<Storage>;

    static void begin() {}
    static void end() {}

    static void scores(const KvShape& shape, const float* query, int rows,
                       const Tile<Storage>& tile, float* scores) {
        in_runs<row_block>(rows, [&](auto num_rows, int row) {
            in_runs<column_block>(tile.num_groups, [&](auto num_groups, int group) {
                some_scores<num_rows.value, num_groups.value>(
                    shape, query + row * shape.head_dim, tile.keys + group,
                    scores + row * key_tile + group * key_group);
            });
        });
    }

    template <int num_rows, int num_groups>
    static void some_scores(const KvShape& shape, const float* query, const Storage* const* keys,
                            float* scores) {
        f32x16 sums[num_rows][num_groups] = {};
        for (int64_t i = 0; i < shape.head_dim; i += pair)
            for (int g = 0; g < num_groups; ++g) {
                const Pair key = load_pair(keys[g] + i * shape.tokens_per_block);
                for (int row = 0; row < num_rows; ++row) {
                    const float* of_row = query + row * shape.head_dim + i;
                    sums[row][g] += of_row[0] * key.first;
                    if (pair == 2) sums[row][g] += of_row[1] * key.second;
                }
            }
        for (int row = 0; row < num_rows; ++row)
            for (int g = 0; g < num_groups; ++g)
                store(scores + row * key_tile + g * key_group, sums[row][g]);
    }

    static void accumulate(const KvShape& shape, int rows, const Tile<Storage>& tile,
                           Scratch& scratch) {
        in_runs<row_block>(rows, [&](auto num_rows, int row) {
            in_runs<column_block>(int(shape.head_dim / lanes), [&](auto num_chunks, int chunk) {
                some_sums<num_rows.value, num_chunks.value>(shape, row, chunk * lanes, tile,
                                                            scratch);
            });
        });
    }

    template <int num_rows, int num_chunks>
    static void some_sums(const KvShape& shape, int first_row, int first_dim,
                          const Tile<Storage>& tile, Scratch& scratch) {
        f32x16 sums[num_rows][num_chunks];
        float* out = scratch.sums + first_row * shape.head_dim + first_dim;
        for (int row = 0; row < num_rows; ++row)
            for (int c = 0; c < num_chunks; ++c)
                sums[row][c] = load(out + row * shape.head_dim + c * lanes) *
                               scratch.rescale[first_row + row];
        for (int key = 0; key < tile.num_keys; key += pair) {
            const float* weights = scratch.scores + first_row * key_tile + key;
            const Storage* values = tile.values[key / key_group] +
                                    key % key_group * shape.head_dim + first_dim * pair;
            const bool both = pair == 2 && key + 1 < tile.num_keys;
            for (int c = 0; c < num_chunks; ++c) {
                const Pair value = load_pair(values + c * lanes * pair);
                for (int row = 0; row < num_rows; ++row) {
                    sums[row][c] += weights[row * key_tile] * value.first;
                    if (both) sums[row][c] += weights[row * key_tile + 1] * value.second;
                }
            }
        }
        for (int row = 0; row < num_rows; ++row)
            for (int c = 0; c < num_chunks; ++c)
                store(out + row * shape.head_dim + c * lanes, sums[row][c]);
    }
};

}  // namespace
}  // namespace inflight
