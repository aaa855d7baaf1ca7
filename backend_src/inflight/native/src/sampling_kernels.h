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

int64_t likeliest(const float* values, int64_t count) {
    constexpr int chains = 4;  // a maximum takes as long as several can be begun in
    wide_float best[chains];
    for (int chain = 0; chain < chains; ++chain) best[chain] = wide_splat(values[0]);
    wide_int is_nan = {};
    int64_t i = 0;
    for (; i + chains * wide_lanes <= count; i += chains * wide_lanes)
        for (int chain = 0; chain < chains; ++chain) {
            const wide_float value = at(values + i + chain * wide_lanes);
            is_nan |= value != value;
            best[chain] = wide_max(value, best[chain]);
        }
    for (; i < count; ++i) {
        const wide_float value = wide_splat(values[i]);
        is_nan |= value != value;
        best[0] = wide_max(value, best[0]);
    }
    if (bits_of(is_nan))
        return first_where(values, count, [](wide_float value) { return value != value; });
    const float peak = largest(wide_max(wide_max(best[0], best[1]), wide_max(best[2], best[3])));
    const wide_float peaks = wide_splat(peak);
    return first_where(values, count, [&](wide_float value) { return value == peaks; });
}

int64_t maxima(const float* values, int64_t count, float* out) {
    int64_t found = 0;
    for (; count >= sampling_height * wide_lanes; count -= sampling_height * wide_lanes) {
        wide_float best = at(values);
        for (int64_t row = 1; row < sampling_height; ++row)
            best = wide_max(at(values + row * wide_lanes), best);
        write(out + found, best);
        found += wide_lanes;
        values += sampling_height * wide_lanes;
    }
    return found;
}

int64_t at_least(const float* values, int64_t count, float bound, int32_t* ids) {
    int64_t found = 0, i = 0;
    const wide_float bounds = wide_splat(bound);
    for (; i + wide_lanes <= count; i += wide_lanes)
        for (uint32_t bits = bits_of(at(values + i) >= bounds); bits; bits &= bits - 1)
            ids[found++] = int32_t(i + __builtin_ctz(bits));
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

// sums[r] = the sum of run r of what `weight_of` gives for each value.
template <class WeightOf>
INFLIGHT_INLINE void sum_runs(const float* values, int64_t count, double* sums,
                              const WeightOf& weight_of) {
    for (int64_t begin = 0; begin < count; begin += sampling_run) {
        const int64_t end = begin + sampling_run < count ? begin + sampling_run : count;
        wide_float parts = {};
        int64_t i = begin;
        for (; i + wide_lanes <= end; i += wide_lanes) parts += weight_of(at(values + i));
        double sum = 0;
        for (int lane = 0; lane < wide_lanes; ++lane) sum += parts[lane];
        for (; i < end; ++i) sum += weight_of(wide_splat(values[i]))[0];
        *sums++ = sum;
    }
}

void run_sums(const float* weights, int64_t count, double* sums) {
    sum_runs(weights, count, sums, [](wide_float value) { return value; });
}

void weight_sums(const float* values, int64_t count, float peak, float factor, double* sums) {
    const wide_float peaks = wide_splat(peak), factors = wide_splat(factor * log2_e);
    sum_runs(values, count, sums, [&](wide_float value) { return weight(value, peaks, factors); });
}

}  // namespace

extern const SamplingKernels sampling{likeliest, maxima,  at_least,
                                      weights,   run_sums, weight_sums};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
