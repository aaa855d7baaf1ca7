// The products of attention_flash.h in vector arithmetic that every machine has.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// Two neighbouring dimensions (of K) or keys (of V); where they do not lie in pairs, the first
// alone.
struct Pair {
    wide_float first, second;
};

inline Pair load_pair(const bf16* from) {
    const wide_bits both = read<wide_bits>(from);
    return {(wide_float)(both << 16), (wide_float)(both & 0xffff0000u)};
}

inline Pair load_pair(const float* from) { return {read<wide_float>(from), wide_float{}}; }

// Compilers convert bytes one by one where they are not told how.
inline Pair load_pair(const int8_t* from) {
#if defined(__AVX512F__)
    const wide_int whole = (wide_int)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    const wide_int whole = (wide_int)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const wide_int whole = {from[0], from[1], from[2], from[3]};
#endif
    return {__builtin_convertvector(whole, wide_float), wide_float{}};
}

template <class StorageType>
struct LoopProducts {
    using Query = float;
    using Storage = StorageType;
    using Weight = float;
    static constexpr int pair = pair_size<Storage>;

    static void begin(int) {}
    static void end() {}
    static void stay_awake() {}

    static const Tile<Storage>& readable(const KvShape&, const Tile<Storage>& tile, Scratch&) {
        return tile;
    }

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
                    shape, query + row * shape.head_dim, keys, tile.key_stride,
                    scores + row * key_tile + vector * wide_lanes);
            });
        });
    }

    template <int num_rows, int num_vectors>
    static void some_scores(const KvShape& shape, const float* query,
                            const Storage* const (&keys)[num_vectors], int64_t key_stride,
                            float* scores) {
        wide_float sums[num_rows][num_vectors] = {};
        for (int64_t i = 0; i < shape.head_dim; i += pair)
            for (int v = 0; v < num_vectors; ++v) {
                const Pair key = load_pair(keys[v] + i * key_stride);
                for (int row = 0; row < num_rows; ++row) {
                    const float* of_row = query + row * shape.head_dim + i;
                    sums[row][v] += of_row[0] * key.first;
                    if (pair == 2) sums[row][v] += of_row[1] * key.second;
                }
            }
        for (int row = 0; row < num_rows; ++row)
            memcpy(scores + row * key_tile, sums[row], sizeof sums[row]);
    }

    static void accumulate(const KvShape& shape, const float* weights, int rows,
                           const Tile<Storage>& tile, float* sums) {
        in_runs<block_rows>(rows, [&](auto num_rows, int row) {
            in_runs<block_vectors>(int(shape.head_dim / wide_lanes), [&](auto num, int vector) {
                some_sums<num_rows.value, num.value>(
                    shape, weights + row * key_tile, tile, vector * wide_lanes,
                    sums + row * shape.head_dim + vector * wide_lanes);
            });
        });
    }

    template <int num_rows, int num_vectors>
    static void some_sums(const KvShape& shape, const float* weights, const Tile<Storage>& tile,
                          int first_dim, float* out) {
        wide_float sums[num_rows][num_vectors];
        for (int row = 0; row < num_rows; ++row)
            memcpy(sums[row], out + row * shape.head_dim, sizeof sums[row]);
        const auto add = [&](int key, auto keys_of_pair) {
            const float* of_key = weights + key;
            const Storage* values = tile.values[key / key_group] +
                                    key % key_group * shape.head_dim + first_dim * pair;
            for (int v = 0; v < num_vectors; ++v) {
                const Pair value = load_pair(values + v * wide_lanes * pair);
                for (int row = 0; row < num_rows; ++row) {
                    sums[row][v] += of_key[row * key_tile] * value.first;
                    if (keys_of_pair.value == 2)
                        sums[row][v] += of_key[row * key_tile + 1] * value.second;
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
