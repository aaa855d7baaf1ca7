// Scores of a strip of rows become weights, over tiles of keys: what was summed is rescaled when a
// row's scores grow (Milakov and Gimelshein's online softmax).
//
// Weights are relative to a reference of their row, which need not be the largest score: any number
// near it gives the same quotients. It is raised only when a score lies far above it, so that most
// tiles rescale nothing.
#pragma once

#include "attention.h"
#include "common_vectors.h"

namespace inflight {
namespace {

// The rows of an item that are worked on together, and what is known of them so far.
struct Strip {
    int first_row, num_rows;  // counted from the item's first row
    float* sums;              // [num_rows][head_dim]
    float* totals;            // [num_rows][lanes]
    float* tops;              // [num_rows], the references, in powers of two
};

// Lower than every score, and still a number: a row that has seen no key yet can be rescaled.
constexpr float lowest_score = -1e30f;

// How far, in powers of two, a score may lie above its row's reference.
constexpr float headroom = 8.0f;

template <class Weight>
Weight* weights_of(Scratch& scratch);
template <>
inline float* weights_of<float>(Scratch& scratch) {
    return scratch.scores;  // in place of the scores
}
template <>
inline bf16* weights_of<bf16>(Scratch& scratch) {
    return scratch.weights;
}

INFLIGHT_INLINE wide_float weight_at(float*, wide_float x) {
    return wide_exp2(x);
}

// The weights of 2 * wide_lanes keys.
INFLIGHT_INLINE void store_weights(float* to, wide_float a, wide_float b) {
    write(to, a);
    write(to + wide_lanes, b);
}

#if defined(__AVX512BF16__)
// 2^x in five steps: x = n + f with n whole and 0 <= f < 1, and the cubic for 2^f whose largest
// relative error, 8e-5, is least. Far less than what rounding to bf16 takes.
INFLIGHT_INLINE wide_float weight_at(bf16*, wide_float x) {
    const wide_float f = (wide_float)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    wide_float p = 7.802452e-2f * f + 2.2606716e-1f;
    p = p * f + 6.9583354e-1f;
    p = p * f + 9.9992522e-1f;
    return (wide_float)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// In one piece: a tile that is loaded soon after would wait for two.
INFLIGHT_INLINE void store_weights(bf16* to, wide_float a, wide_float b) {
    write(to, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
#endif

// Whether a lane is larger; NaN is not.
INFLIGHT_INLINE bool any_above(wide_float value, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)(value > bound)) != 0;
#else
    return largest(value) > bound;
#endif
}

INFLIGHT_INLINE void raise_reference(const Strip& strip, int row, float tallest, int64_t size) {
    const float shrink = exp2(strip.tops[row] - tallest);
    strip.tops[row] = tallest;
    float *totals = strip.totals + row * lanes, *sums = strip.sums + row * size;
    store(totals, load(totals) * shrink);
    for (int64_t i = 0; i < size; i += lanes) store(sums + i, load(sums + i) * shrink);
}

// Turns the scores of the first `num_keys` of a tile, in units of which `factor` make one power of
// two, into weights, and adds these to the totals. What is handed on is multiplied by
// `value_scales`, one for each key, where it is not null.
template <int num_keys, class Weight>
void soften_keys(const Strip& strip, float factor, int64_t size, const float* value_scales,
            Scratch& scratch) {
    constexpr int num_vectors = num_keys / wide_lanes;
    for (int row = 0; row < strip.num_rows; ++row) {
        const float* scores = scratch.scores + row * key_tile;
        Weight* weights = weights_of<Weight>(scratch) + row * key_tile;
        wide_float score[num_vectors], top = read<wide_float>(scores);
        for (int i = 0; i < num_vectors; ++i) {
            score[i] = read<wide_float>(scores + i * wide_lanes);
            top = wide_max(top, score[i]);
        }
        if (any_above(top * factor, strip.tops[row] + headroom))
            raise_reference(strip, row, largest(top) * factor, size);
        const float reference = strip.tops[row];
        float* totals = strip.totals + row * lanes;
        wide_float total = read<wide_float>(totals);
        for (int i = 0; i < num_vectors; i += 2) {
            wide_float a = weight_at(weights, score[i] * factor - reference);
            wide_float b = weight_at(weights, score[i + 1] * factor - reference);
            total += a + b;
            if (value_scales) {
                a *= read<wide_float>(value_scales + i * wide_lanes);
                b *= read<wide_float>(value_scales + (i + 1) * wide_lanes);
            }
            store_weights(weights + i * wide_lanes, a, b);
        }
        write(totals, total);
    }
}

// Of a whole tile, or of its first half where no more than that is seen.
template <class Weight>
void soften(const Strip& strip, int num_seen, float factor, int64_t size,
            const float* value_scales, Scratch& scratch) {
    if (num_seen > key_tile / 2)
        soften_keys<key_tile, Weight>(strip, factor, size, value_scales, scratch);
    else
        soften_keys<key_tile / 2, Weight>(strip, factor, size, value_scales, scratch);
}

}  // namespace
}  // namespace inflight
