// The kernels of sampling.h, once for every instruction set: include it after defining INFLIGHT_ISA
// as the namespace they go to.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common_vectors.h"
#include "sampling.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

INFLIGHT_INLINE wide_float at(const float* values) { return read<wide_float>(values); }

// Bit i: lane i of a comparison.
INFLIGHT_INLINE uint32_t bits_of(wide_int mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)mask));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < wide_lanes; ++lane) bits |= uint32_t(mask[lane] & 1) << lane;
    return bits;
#endif
}

// The first place at which `is_wanted` finds a lane; `count` where there is none.
template <class IsWanted>
INFLIGHT_INLINE int64_t first_where(const float* values, int64_t count, const IsWanted& is_wanted) {
    int64_t i = 0;
    for (; i + wide_lanes <= count; i += wide_lanes)
        if (const uint32_t bits = bits_of(is_wanted(at(values + i)))) return i + __builtin_ctz(bits);
    while (i < count && !is_wanted(wide_splat(values[i]))[0]) ++i;
    return i;
}

// The maxima of `height` vectors that follow each other, lane by lane; NaN where there is one.
INFLIGHT_INLINE wide_float highest(const float* values, int64_t height) {
    constexpr int chains = 4;  // a maximum takes as long as several can be begun in
    wide_float best[chains];
    for (int chain = 0; chain < chains; ++chain) best[chain] = at(values);
    wide_int is_number = best[0] == best[0];
    int64_t row = 0;
    for (; row + chains <= height; row += chains)
        for (int chain = 0; chain < chains; ++chain) {
            const wide_float value = at(values + (row + chain) * wide_lanes);
            is_number &= value == value;
            best[chain] = wide_max(value, best[chain]);
        }
    for (; row < height; ++row) {
        const wide_float value = at(values + row * wide_lanes);
        is_number &= value == value;
        best[0] = wide_max(value, best[0]);
    }
    const wide_float all = wide_max(wide_max(best[0], best[1]), wide_max(best[2], best[3]));
    return is_number ? all : wide_splat(__builtin_nanf(""));
}

constexpr int64_t block_values = sampling_height * wide_lanes;

int64_t maxima(const float* values, int64_t count, float* out) {
    int64_t found = 0;
    for (; count >= block_values; count -= block_values, values += block_values) {
        write(out + found, highest(values, sampling_height));
        found += wide_lanes;
    }
    if (const int64_t height = count / wide_lanes) {
        write(out + found, highest(values, height));
        found += wide_lanes;
        values += height * wide_lanes;
    }
    for (count %= wide_lanes; count > 0; --count) out[found++] = *values++;
    return found;
}

// NaN, which any number of them makes of all, or the largest of `count` >= 1.
float largest_of(const float* values, int64_t count) {
    float best = values[0];
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] != values[i]) return values[i];
        if (values[i] > best) best = values[i];
    }
    return best;
}

// Looks only at the block of the first maximum that is the largest.
int64_t likeliest(const float* values, int64_t count, const float* maxima, int64_t num_maxima) {
    const float peak = largest_of(maxima, num_maxima);
    if (peak != peak)
        return first_where(values, count, [](wide_float value) { return value != value; });
    const auto is_peak = [peak](wide_float value) { return value == wide_splat(peak); };
    const int64_t block = first_where(maxima, num_maxima, is_peak) / wide_lanes;
    const int64_t last_block = count / block_values;
    const int64_t begin = (block < last_block ? block : last_block) * block_values;
    return begin + first_where(values + begin, count - begin, is_peak);
}

// Writes the ids of the lanes whose bits are set and returns how many they are. `ids` has room for
// those of all lanes.
INFLIGHT_INLINE int64_t write_ids(uint32_t bits, int64_t first_id, int32_t* ids) {
    if (!bits) return 0;
#if defined(__AVX512F__)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i of_lanes = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(first_id)));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(__mmask16(bits), of_lanes));
    return __builtin_popcount(bits);
#else
    const int32_t* const begin = ids;
    for (; bits; bits &= bits - 1) *ids++ = int32_t(first_id + __builtin_ctz(bits));
    return ids - begin;
#endif
}

int64_t at_least(const float* values, int64_t count, float bound, int32_t* ids) {
    int64_t found = 0, i = 0;
    const wide_float bounds = wide_splat(bound);
    for (; i + wide_lanes <= count; i += wide_lanes)
        found += write_ids(bits_of(at(values + i) >= bounds), i, ids + found);
    for (; i < count; ++i)
        if (values[i] >= bound) ids[found++] = int32_t(i);
    return found;
}

INFLIGHT_INLINE wide_float weight(wide_float value, wide_float peak, wide_float factor) {
    return wide_exp2(wide_min(wide_splat(127.0f), (value - peak) * factor));
}

void weights(const float* values, int64_t count, float peak, float factor, float* out) {
    const wide_float peaks = wide_splat(peak), factors = wide_splat(factor * log2_e);
    int64_t i = 0;
    for (; i + wide_lanes <= count; i += wide_lanes)
        write(out + i, weight(at(values + i), peaks, factors));
    for (; i < count; ++i) out[i] = weight(wide_splat(values[i]), peaks, factors)[0];
}

// In pairs: a chain of one addition after the other takes as long as the weights of a run.
INFLIGHT_INLINE double sum_of_lanes(wide_float parts) {
    double lanes_left[wide_lanes];
    for (int lane = 0; lane < wide_lanes; ++lane) lanes_left[lane] = parts[lane];
#pragma GCC unroll 4
    for (int num = wide_lanes / 2; num > 0; num /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < num; ++lane) lanes_left[lane] += lanes_left[lane + num];
    return lanes_left[0];
}

// take(sum) for each run, of what `weight_of` gives for its values.
template <class WeightOf, class Take>
INFLIGHT_INLINE void sum_runs(const float* values, int64_t count, const WeightOf& weight_of,
                              const Take& take) {
    for (int64_t begin = 0; begin < count; begin += sampling_run) {
        const int64_t end = begin + sampling_run < count ? begin + sampling_run : count;
        wide_float parts = {};
        int64_t i = begin;
        for (; i + wide_lanes <= end; i += wide_lanes) parts += weight_of(at(values + i));
        double sum = sum_of_lanes(parts);
        for (; i < end; ++i) sum += weight_of(wide_splat(values[i]))[0];
        take(sum);
    }
}

double sum_at_least(const float* weights, int64_t count, float bound) {
    const wide_float bounds = wide_splat(bound);
    double total = 0;
    sum_runs(
        weights, count,
        [&](wide_float value) { return value >= bounds ? value : wide_float{}; },
        [&](double sum) { total += sum; });
    return total;
}

void run_sums(const float* weights, int64_t count, double* sums) {
    sum_runs(
        weights, count, [](wide_float value) { return value; },
        [&](double sum) { *sums++ = sum; });
}

void weight_sums(const float* values, int64_t count, float peak, float factor, double* sums) {
    const wide_float peaks = wide_splat(peak), factors = wide_splat(factor * log2_e);
    sum_runs(
        values, count, [&](wide_float value) { return weight(value, peaks, factors); },
        [&](double sum) { *sums++ = sum; });
}

}  // namespace

extern const SamplingKernels sampling{maxima,       likeliest, at_least,   weights,
                                      sum_at_least, run_sums,  weight_sums};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
