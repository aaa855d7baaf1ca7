// The products of attention_flash.h in vector arithmetic that every machine has.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "attention_flash.h"
#include "counted.h"

namespace inflight {
namespace {

constexpr int vectors_per_group = lanes / wide_lanes;

// What is summed at a time: so many rows at most, and with so many rows so many groups of 16 keys
// or dimensions. That many sums fit into the registers beside the factors.
constexpr int block_rows = wide_lanes == 16 ? 4 : wide_lanes == 8 ? 6 : 3;

constexpr int block_groups(int num_rows) {
    if (wide_lanes == 16) return 4;
    const int groups = num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1;
    return wide_lanes == 8 || groups == 1 ? groups : groups / 2;
}

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

// Of pairs of neighbouring dimensions (of K) or keys (of V) the first of each, or the second.
template <int which>
INFLIGHT_INLINE wide_float load_half(const bf16* from) {
    wide_bits both = read<wide_bits>(from);
    if (which == 0) return (wide_float)(both << 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Compilers keep the mask in the register that the last sum needs.
    constexpr uint32_t half = 0xffff0000u;
    alignas(32) static const uint32_t upper[] = {half, half, half, half, half, half, half, half};
    __asm__("vpand %1, %0, %0" : "+x"(both) : "m"(upper));
    return (wide_float)both;
#else
    return (wide_float)(both & 0xffff0000u);
#endif
}

// Where they do not lie in pairs.
template <int>
INFLIGHT_INLINE wide_float load_half(const float* from) {
    return read<wide_float>(from);
}

// Compilers convert bytes one by one where they are not told how.
template <int>
INFLIGHT_INLINE wide_float load_half(const int8_t* from) {
#if defined(__AVX512F__)
    const wide_int whole = (wide_int)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    const wide_int whole = (wide_int)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const wide_int whole = {from[0], from[1], from[2], from[3]};
#endif
    return __builtin_convertvector(whole, wide_float);
}

// sums[row][v] += left[row] * right(v). Of the two kinds of factors the fewer stay in registers.
// All loops over sums are unrolled, here and below: compilers keep in memory what is indexed.
template <int num_rows, int num_vectors, class Right>
INFLIGHT_INLINE void add_products(wide_float (&sums)[num_rows][num_vectors], const float* left,
                                  int64_t left_stride, const Right& right) {
    if (num_rows < num_vectors) {
        wide_float lefts[num_rows];
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row) lefts[row] = wide_splat(left[row * left_stride]);
#pragma GCC unroll 16
        for (int v = 0; v < num_vectors; ++v) {
            const wide_float factor = right(v);
#pragma GCC unroll 8
            for (int row = 0; row < num_rows; ++row) sums[row][v] += lefts[row] * factor;
        }
    } else {
        wide_float rights[num_vectors];
#pragma GCC unroll 16
        for (int v = 0; v < num_vectors; ++v) rights[v] = right(v);
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row) {
            const float factor = left[row * left_stride];
#pragma GCC unroll 16
            for (int v = 0; v < num_vectors; ++v) sums[row][v] += factor * rights[v];
        }
    }
}

template <int num_rows, int num_vectors>
INFLIGHT_INLINE void load_sums(wide_float (&sums)[num_rows][num_vectors], const float* from,
                               int64_t stride) {
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row)
#pragma GCC unroll 16
        for (int v = 0; v < num_vectors; ++v)
            sums[row][v] = read<wide_float>(from + row * stride + v * wide_lanes);
}

template <int num_rows, int num_vectors>
INFLIGHT_INLINE void store_sums(const wide_float (&sums)[num_rows][num_vectors], float* to,
                                int64_t stride) {
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row)
#pragma GCC unroll 16
        for (int v = 0; v < num_vectors; ++v)
            write(to + row * stride + v * wide_lanes, sums[row][v]);
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

    // Whether the next tile has that many groups, to be fetched while this one is worked on. Few
    // rows wait for memory, and many for the arithmetic.
    static bool can_fetch(const Tile<Storage>& tile, int rows, int num_groups) {
        return rows < strip_rows && tile.next && num_groups <= tile.next->num_groups;
    }

    static void fetch(const Storage* at) { __builtin_prefetch(at, 0, 2); }

    static void scores(const KvShape& shape, const float* query, int rows,
                       const Tile<Storage>& tile, float* scores) {
        in_blocks<block_rows>(rows, [&](auto num_rows, int row) {
            in_runs<block_groups(num_rows.value)>(tile.num_groups, [&](auto num, int group) {
                const bool fetches = row == 0 && can_fetch(tile, rows, group + num.value);
                some_scores<num_rows.value, num.value>(
                    shape, query + row * shape.head_dim, tile.keys + group,
                    (fetches ? *tile.next : tile).keys + group, tile.key_stride,
                    scores + row * key_tile + group * key_group);
            });
        });
    }

    // A call of its own, as some_sums: compilers spill sums where much else is at hand. `ahead` are
    // keys to be fetched, or the same again.
    template <int num_rows, int num_groups>
    __attribute__((noinline)) static void some_scores(const KvShape& shape, const float* query,
                                                      const Storage* const* keys,
                                                      const Storage* const* ahead,
                                                      int64_t key_stride, float* scores) {
        wide_float sums[num_rows][num_groups * vectors_per_group] = {};
        for (int64_t i = 0; i < shape.head_dim; i += pair) {
#pragma GCC unroll 4
            for (int group = 0; group < num_groups; ++group) fetch(ahead[group] + i * key_stride);
            add_keys<0>(sums, shape, query, keys, i, i * key_stride);
        }
        // Beside both halves of a pair there is no room for as many sums.
        for (int64_t i = 0; pair == 2 && i < shape.head_dim; i += pair)
            add_keys<1>(sums, shape, query, keys, i, i * key_stride);
        store_sums(sums, scores, key_tile);
    }

    template <int which, int num_rows, int num_vectors>
    INFLIGHT_INLINE void add_keys(wide_float (&sums)[num_rows][num_vectors], const KvShape& shape,
                                  const float* query, const Storage* const* keys, int64_t i,
                                  int64_t at) {
        add_products(sums, query + i + which, shape.head_dim, [&](int v) {
            const int of_group = v % vectors_per_group * wide_lanes;
            return load_half<which>(keys[v / vectors_per_group] + at + of_group * pair);
        });
    }

    static void accumulate(const KvShape& shape, const float* weights, int rows,
                           const Tile<Storage>& tile, float* sums) {
        in_blocks<block_rows>(rows, [&](auto num_rows, int row) {
            const int num_groups = int(shape.head_dim / lanes);
            in_runs<block_groups(num_rows.value)>(num_groups, [&](auto num, int group) {
                some_sums<num_rows.value, num.value>(
                    shape, weights + row * key_tile, tile, group * lanes,
                    row == 0 && can_fetch(tile, rows, 0),
                    sums + row * shape.head_dim + group * lanes);
            });
        });
    }

    template <int num_rows, int num_groups>
    __attribute__((noinline)) static void some_sums(const KvShape& shape, const float* weights,
                                                    const Tile<Storage>& tile, int first_dim,
                                                    bool fetches, float* out) {
        wide_float sums[num_rows][num_groups * vectors_per_group];
        load_sums(sums, out, shape.head_dim);
        for (int group = 0; group < tile.num_groups; ++group) {
            const int first = group * key_group, left = tile.num_keys - first;
            const int count = left < key_group ? left : key_group;
            const Storage* values = tile.values[group] + first_dim * pair;
            const bool has_next = fetches && group < tile.next->num_groups;
            const Storage* ahead = (has_next ? *tile.next : tile).values[group] + first_dim * pair;
            for (int key = 0; key < count; key += pair) {
#pragma GCC unroll 4
                for (int g = 0; g < num_groups; ++g)
                    fetch(ahead + key * shape.head_dim + g * lanes * pair);
                add_values<0>(sums, shape, weights + first, values, key);
            }
            for (int key = 0; pair == 2 && key + 1 < count; key += pair)
                add_values<1>(sums, shape, weights + first, values, key);
        }
        store_sums(sums, out, shape.head_dim);
    }

    template <int which, int num_rows, int num_vectors>
    INFLIGHT_INLINE void add_values(wide_float (&sums)[num_rows][num_vectors], const KvShape& shape,
                                    const float* weights, const Storage* values, int key) {
        add_products(sums, weights + key + which, key_tile, [&](int v) {
            return load_half<which>(values + key * shape.head_dim + v * wide_lanes * pair);
        });
    }
};

}  // namespace
}  // namespace inflight
