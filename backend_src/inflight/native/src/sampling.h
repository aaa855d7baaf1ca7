// Passes over a row of logits; one version for each instruction set.
#pragma once

#include <cstdint>

namespace inflight {

// Values that one of `maxima` stands for, at most.
constexpr int64_t sampling_height = 64;

// Room that `maxima` needs for `count` values, whatever the width of a vector.
static inline int64_t most_maxima(int64_t count) { return count / sampling_height + 32; }

// Weights that are summed before runs are.
constexpr int64_t sampling_run = 256;

struct SamplingKernels {
    // Writes the maxima of disjoint sets of at most sampling_height values, which are all of them,
    // and returns how many; that of a set with a NaN is NaN.
    int64_t (*maxima)(const float* values, int64_t count, float* out);
    // The first place of the largest value, or of the first NaN if there is one. count >= 1.
    int64_t (*likeliest)(const float* values, int64_t count, const float* maxima,
                         int64_t num_maxima);
    // The ids, ascending, of values >= bound; returns how many. `ids` has room for all.
    int64_t (*at_least)(const float* values, int64_t count, float bound, int32_t* ids);
    // weights = exp((values - peak) * factor).
    void (*weights)(const float* values, int64_t count, float peak, float factor, float* weights);
    // The sum of the weights that are >= bound.
    double (*sum_at_least)(const float* weights, int64_t count, float bound);
    // sums[r] = the sum of run r of `weights`; the last one may be shorter.
    void (*run_sums)(const float* weights, int64_t count, double* sums);
    // run_sums of `weights`, to the bit, without writing those.
    void (*weight_sums)(const float* values, int64_t count, float peak, float factor, double* sums);
};

#define INFLIGHT_DECLARE_SAMPLING(isa)     \
    namespace isa {                        \
    extern const SamplingKernels sampling; \
    }
INFLIGHT_DECLARE_SAMPLING(portable)
INFLIGHT_DECLARE_SAMPLING(avx2)
INFLIGHT_DECLARE_SAMPLING(avx512)
#undef INFLIGHT_DECLARE_SAMPLING

}  // namespace inflight
