// The C functions of sampling.py: which tokens of a row survive top_k, min_p and top_p, with what
// weights, and which of them is drawn. Equal values rank by id, the lower one first.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "dispatch.h"
#include "team.h"

namespace inflight {
namespace {

constexpr Versions<const SamplingKernels*> versions{
    &portable::sampling, INFLIGHT_IF_AVX2(&avx2::sampling), INFLIGHT_IF_AVX512(&avx512::sampling),
    nullptr};

// Maxima for each value wanted, at least: fewer give more false candidates.
constexpr int64_t maxima_per_wanted = 2;

// A nucleus is first looked for among this many of the largest weights.
constexpr int64_t likely_nucleus = 256;

// A weight's bucket is its sign, exponent and six bits of its fraction: 1.6% wide.
constexpr int bucket_shift = 17;
constexpr int64_t num_buckets = (0x3f800000 >> bucket_shift) + 2;  // up to 1, and what rounds above

using Floats = std::vector<float>;
using Ids = std::vector<int64_t>;

int64_t bucket_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return std::min<int64_t>(bits >> bucket_shift, num_buckets - 1);
}

// A value that at least `count` of the row reach, and few more where values are spread.
float bound_of(const SamplingKernels& run, const float* values, int64_t size, int64_t count) {
    if (size / sampling_height < maxima_per_wanted * count) return -INFINITY;
    static thread_local Floats maxima;
    maxima.resize(size / sampling_height);
    const int64_t found = run.maxima(values, size, maxima.data());
    if (found < count) return -INFINITY;
    const auto last = maxima.begin() + (count - 1);
    std::nth_element(maxima.begin(), last, maxima.begin() + found, std::greater<>());
    return *last;
}

// Keeps the `wanted` largest of `count` values and their ids, in their order.
int64_t keep_largest(int64_t* ids, float* values, int64_t count, int64_t wanted) {
    if (count <= wanted) return count;
    static thread_local Floats ranked;
    ranked.assign(values, values + count);
    std::nth_element(ranked.begin(), ranked.begin() + (wanted - 1), ranked.end(), std::greater<>());
    const float last = ranked[wanted - 1];
    int64_t equals = wanted - std::count_if(values, values + count, [&](float v) { return v > last; });
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!(values[i] > last) && !(values[i] == last && equals-- > 0)) continue;
        ids[kept] = ids[i];
        values[kept++] = values[i];
    }
    return kept;
}

double total_of(const SamplingKernels& run, const float* weights, int64_t count) {
    static thread_local std::vector<double> sums;
    sums.resize(count / sampling_run + 1);
    run.run_sums(weights, count, sums.data());
    double total = 0;
    for (int64_t i = 0; i * sampling_run < count; ++i) total += sums[i];
    return total;
}

// Ids of all weights that are not below one, so many that they sum to `wanted`, top_p of all.
int64_t nucleus_candidates(const SamplingKernels& run, const float* weights, int64_t size,
                           double wanted, float top_p, int64_t* ids) {
    const float likely = bound_of(run, weights, size, likely_nucleus);
    int64_t count = run.at_least(weights, size, likely, ids);
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += weights[ids[i]];
    if (sum >= wanted) return count;
    // Those left out are together at most half of what a nucleus may leave out.
    const double spare = wanted / top_p - wanted;
    return run.at_least(weights, size, float(spare / 2 / double(size)), ids);
}

// The fewest largest weights that sum to `wanted`: all of the buckets above one, and of that one
// the largest.
int64_t keep_nucleus(int64_t* ids, float* weights, int64_t count, double wanted) {
    static thread_local std::vector<double> sums;
    sums.assign(num_buckets, 0.0);
    for (int64_t i = 0; i < count; ++i) sums[bucket_of(weights[i])] += weights[i];
    double reached = 0;
    int64_t last = num_buckets - 1;
    while (last > 0 && reached + sums[last] < wanted) reached += sums[last--];

    static thread_local Ids ranked;
    ranked.clear();
    for (int64_t i = 0; i < count; ++i)
        if (bucket_of(weights[i]) == last) ranked.push_back(i);
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    int64_t taken = 0;
    while (taken < int64_t(ranked.size()) && (taken == 0 || reached < wanted))
        reached += weights[ranked[taken++]];
    std::sort(ranked.begin(), ranked.begin() + taken);

    int64_t kept = 0, next = 0;
    for (int64_t i = 0; i < count; ++i) {
        const bool is_taken = next < taken && ranked[next] == i;
        next += is_taken;
        if (!is_taken && bucket_of(weights[i]) <= last) continue;
        ids[kept] = ids[i];
        weights[kept++] = weights[i];
    }
    return kept;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

// What survives of a row: its ids, ascending, and its weights exp((logit - peak) * factor). Returns
// how many, or -1 when everything does: no ids are written then. `ids` and `weights` have room for
// the row. top_k = size, top_p = 1 and least_logit = -inf keep everything.
INFLIGHT_API int64_t inflight_survivors(const float* logits, int64_t size, int64_t top_k,
                                        float top_p, float least_logit, float peak, float factor,
                                        int64_t* ids, float* weights) {
    const SamplingKernels& run = *versions.chosen();
    int64_t count = size;
    const bool are_cut = top_k < size || least_logit > -INFINITY;
    if (are_cut) {
        const float bound = top_k < size ? bound_of(run, logits, size, top_k) : -INFINITY;
        count = run.at_least(logits, size, std::max(bound, least_logit), ids);
        for (int64_t i = 0; i < count; ++i) weights[i] = logits[ids[i]];
        count = keep_largest(ids, weights, count, top_k);
    }
    run.weights(are_cut ? weights : logits, count, peak, factor, weights);
    if (top_p >= 1) return are_cut ? count : -1;
    const double wanted = top_p * total_of(run, weights, count);
    if (!are_cut) {
        count = nucleus_candidates(run, weights, size, wanted, top_p, ids);
        for (int64_t i = 0; i < count; ++i) weights[i] = weights[ids[i]];
    }
    return keep_nucleus(ids, weights, count, wanted);
}

// The first place whose cumulative weight exceeds uniform [0, 1) times the sum of all; never one of
// weight 0.
INFLIGHT_API int64_t inflight_pick(const float* weights, int64_t count, double uniform) {
    static thread_local std::vector<double> sums;
    sums.resize(count / sampling_run + 1);
    versions.chosen()->run_sums(weights, count, sums.data());
    const int64_t runs = (count + sampling_run - 1) / sampling_run;
    double total = 0;
    for (int64_t i = 0; i < runs; ++i) total += sums[i];
    // uniform * total may round up to the total itself; every run must stay reachable.
    const double target = std::min(uniform * total, std::nextafter(total, 0.0));
    double before = 0;
    int64_t run = 0;
    while (run + 1 < runs && before + sums[run] <= target) before += sums[run++];
    int64_t place = run * sampling_run;
    const int64_t end = std::min(count, place + sampling_run);
    int64_t last = place;
    for (; place < end; ++place) {
        if (weights[place] > 0) last = place;
        before += weights[place];
        if (before > target) return place;
    }
    return last;  // the two sums of a run differ in their last bits
}
