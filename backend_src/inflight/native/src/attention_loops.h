// The products of attention_flash.h in vector arithmetic that every machine has.
#pragma once

#include "attention_flash.h"

namespace inflight {
namespace {

// A block of sums that fits into the registers.
constexpr int block_rows = 4, block_vectors = wide_lanes == 16 ? 4 : 2;

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
        constexpr int fewer = most > 4 ? most / 2 : most - 1;
        if (first < count)
            in_runs<fewer>(count - first, [&](auto n, int at) { body(n, first + at); });
    }
}

// Two neighbouring dimensions (of K) or keys (of V); with float storage the first alone.
struct Pair {
    wide_float first, second;
};

inline Pair load_pair(const bf16* from) {
    const wide_bits both = read<wide_bits>(from);
    return {(wide_float)(both << 16), (wide_float)(both & 0xffff0000u)};
}

inline Pair load_pair(const float* from) { return {read<wide_float>(from), wide_float{}}; }

template <class StorageType>
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
        constexpr int vectors_per_group = key_group / wide_lanes;
        in_runs<block_rows>(rows, [&](auto num_rows, int row) {
            in_runs<block_vectors>(tile.num_groups * vectors_per_group, [&](auto num, int vector) {
                const Storage* keys[num.value];
                for (int v = 0; v < num.value; ++v) {
                    const int first_key = (vector + v) * wide_lanes;
                    keys[v] = tile.keys[first_key / key_group] + first_key % key_group * pair;
                }
                some_scores<num_rows.value, num.value>(
                    shape, query + row * shape.head_dim, keys,
                    scores + row * key_tile + vector * wide_lanes);
            });
        });
    }

    template <int num_rows, int num_vectors>
    static void some_scores(const KvShape& shape, const float* query,
                            const Storage* const (&keys)[num_vectors], float* scores) {
        wide_float sums[num_rows][num_vectors] = {};
        for (int64_t i = 0; i < shape.head_dim; i += pair)
            for (int v = 0; v < num_vectors; ++v) {
                const Pair key = load_pair(keys[v] + i * shape.tokens_per_block);
                for (int row = 0; row < num_rows; ++row) {
                    const float* of_row = query + row * shape.head_dim + i;
                    sums[row][v] += of_row[0] * key.first;
                    if (pair == 2) sums[row][v] += of_row[1] * key.second;
                }
            }
        for (int row = 0; row < num_rows; ++row)
            memcpy(scores + row * key_tile, sums[row], sizeof sums[row]);
    }

    static void accumulate(const KvShape& shape, int rows, const Tile<Storage>& tile,
                           Scratch& scratch) {
        in_runs<block_rows>(rows, [&](auto num_rows, int row) {
            in_runs<block_vectors>(int(shape.head_dim / wide_lanes), [&](auto num, int vector) {
                some_sums<num_rows.value, num.value>(shape, row, vector * wide_lanes, tile,
                                                     scratch);
            });
        });
    }

    template <int num_rows, int num_vectors>
    static void some_sums(const KvShape& shape, int first_row, int first_dim,
                          const Tile<Storage>& tile, Scratch& scratch) {
        wide_float sums[num_rows][num_vectors];
        float* out = scratch.sums + first_row * shape.head_dim + first_dim;
        for (int row = 0; row < num_rows; ++row)
            for (int v = 0; v < num_vectors; ++v)
                sums[row][v] = read<wide_float>(out + row * shape.head_dim + v * wide_lanes) *
                               scratch.rescale[first_row + row];
        const auto add = [&](int key, auto keys_of_pair) {
            const float* weights = scratch.scores + first_row * key_tile + key;
            const Storage* values = tile.values[key / key_group] +
                                    key % key_group * shape.head_dim + first_dim * pair;
            for (int v = 0; v < num_vectors; ++v) {
                const Pair value = load_pair(values + v * wide_lanes * pair);
                for (int row = 0; row < num_rows; ++row) {
                    sums[row][v] += weights[row * key_tile] * value.first;
                    if (keys_of_pair.value == 2)
                        sums[row][v] += weights[row * key_tile + 1] * value.second;
                }
            }
        };
        int key = 0;
        for (; key + pair <= tile.num_keys; key += pair) add(key, Count<pair>{});
        if (key < tile.num_keys) add(key, Count<1>{});
        for (int row = 0; row < num_rows; ++row)
            memcpy(out + row * shape.head_dim, sums[row], sizeof sums[row]);
    }
};

}  // namespace
}  // namespace inflight
