// Which tokens of a row survive min_p, top_k and top_p, without sorting the vocabulary. For files
// that are compiled for any machine.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling.h"

namespace inflight {

// Kept by a thread from row to row: its vectors grow to the largest row and stay.
struct SamplingScratch {
    std::vector<int32_t> ids;    // of what survives, ascending
    std::vector<float> weights;  // the same, theirs
    std::vector<double> sums;    // of runs of weights
    std::vector<float> values;   // to be ranked
    std::vector<int32_t> places, ranked;
};

struct LogitRow {
    const SamplingKernels& kernels;
    const float* logits;
    int64_t size;
    float peak, factor;  // the weight of a logit is exp((logit - peak) * factor)
    const std::vector<float>& maxima;  // as the kernel of that name gives them

    // The sums of the runs of all weights; returns their total.
    double weight_sums(std::vector<double>* sums) const;
};

// The sums of the runs of `count` weights; returns their total.
double run_sums(const SamplingKernels& kernels, const float* weights, int64_t count,
                std::vector<double>* sums);

// These leave ids and weights of what survives in the scratch, and return how many do. Equal values
// rank by id, the lower one first.

// The top_k (>= 1) largest logits that are >= least_logit, which is not above the peak.
int64_t keep_largest_logits(const LogitRow& row, int64_t top_k, float least_logit,
                            SamplingScratch& scratch);

// The fewest largest weights of the row that sum to top_p (0..1) of all of it.
int64_t keep_nucleus(const LogitRow& row, double top_p, SamplingScratch& scratch);

// The same among the first `count` of the scratch.
int64_t keep_nucleus(const LogitRow& row, double top_p, int64_t count, SamplingScratch& scratch);

}  // namespace inflight
