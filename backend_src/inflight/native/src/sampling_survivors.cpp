// Thresholds without a sort: the maxima of columns bound the k-th largest value from below, and a
// histogram of the weights' exponents finds the border of a nucleus.
#include "sampling_survivors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace inflight {
namespace {

// Maxima for each value wanted, at least: fewer give more false candidates.
constexpr int64_t maxima_per_wanted = 2;

// A nucleus is first looked for among this many of the largest weights.
constexpr int64_t likely_nucleus = 256;

// A weight's bucket is its sign, exponent and six bits of its fraction: 1.6% wide.
constexpr int bucket_shift = 17;
constexpr int64_t num_buckets = (0x3f800000 >> bucket_shift) + 2;  // up to 1, and what rounds above

int64_t bucket_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return std::min<int64_t>(bits >> bucket_shift, num_buckets - 1);
}

double total_of(const std::vector<double>& sums) {
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

int64_t num_runs(int64_t count) { return (count + sampling_run - 1) / sampling_run; }

// A logit that at least `count` of the row reach, and few more where logits are spread.
float bound_of(const LogitRow& row, int64_t count, std::vector<float>& ranked) {
    if (int64_t(row.maxima.size()) < maxima_per_wanted * count) return -INFINITY;
    ranked = row.maxima;
    const auto last = ranked.begin() + (count - 1);
    std::nth_element(ranked.begin(), last, ranked.end(), std::greater<>());
    return *last;
}

// Ids and logits, where the weights go later, of all that are >= bound.
int64_t take_at_least(const LogitRow& row, float bound, SamplingScratch& scratch) {
    scratch.ids.resize(row.size);
    scratch.weights.resize(row.size);
    const int64_t count = row.kernels.at_least(row.logits, row.size, bound, scratch.ids.data());
    for (int64_t i = 0; i < count; ++i) scratch.weights[i] = row.logits[scratch.ids[i]];
    return count;
}

void weigh(const LogitRow& row, int64_t count, SamplingScratch& scratch) {
    float* values = scratch.weights.data();
    row.kernels.weights(values, count, row.peak, row.factor, values);
}

// Keeps the `wanted` largest of `count` values in their order.
int64_t keep_largest(int64_t count, int64_t wanted, SamplingScratch& scratch) {
    if (count <= wanted) return count;
    float* values = scratch.weights.data();
    std::vector<float>& ranked = scratch.values;
    ranked.assign(values, values + count);
    std::nth_element(ranked.begin(), ranked.begin() + (wanted - 1), ranked.end(), std::greater<>());
    const float last = ranked[wanted - 1];
    int64_t equals = wanted - std::count_if(values, values + count, [&](float v) { return v > last; });
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!(values[i] > last) && !(values[i] == last && equals-- > 0)) continue;
        scratch.ids[kept] = scratch.ids[i];
        values[kept++] = values[i];
    }
    return kept;
}

// The places, ascending, of the largest weights of one bucket that bring `reached` to `wanted`, at
// least one.
void take_of_border(int64_t border, int64_t count, double reached, double wanted,
                    SamplingScratch& scratch) {
    const float* weights = scratch.weights.data();
    std::vector<int32_t>& ranked = scratch.places;
    ranked.clear();
    for (int64_t i = 0; i < count; ++i)
        if (bucket_of(weights[i]) == border) ranked.push_back(int32_t(i));
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
    size_t taken = 0;
    while (taken < ranked.size() && (taken == 0 || reached < wanted))
        reached += weights[ranked[taken++]];
    ranked.resize(taken);
    std::sort(ranked.begin(), ranked.end());
}

// The fewest largest weights that sum to `wanted`: all of the buckets above one, and of that one
// the largest.
int64_t keep_until(double wanted, int64_t count, SamplingScratch& scratch) {
    float* weights = scratch.weights.data();
    scratch.buckets.resize(num_buckets);
    for (int64_t i = 0; i < count; ++i) scratch.buckets[bucket_of(weights[i])] += weights[i];
    double reached = 0;
    int64_t border = num_buckets - 1;
    while (border > 0 && reached + scratch.buckets[border] < wanted)
        reached += scratch.buckets[border--];
    for (int64_t i = 0; i < count; ++i) scratch.buckets[bucket_of(weights[i])] = 0;
    take_of_border(border, count, reached, wanted, scratch);

    int64_t kept = 0;
    size_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
        const bool is_taken = next < scratch.places.size() && scratch.places[next] == i;
        next += is_taken;
        if (!is_taken && bucket_of(weights[i]) <= border) continue;
        scratch.ids[kept] = scratch.ids[i];
        weights[kept++] = weights[i];
    }
    return kept;
}

}  // namespace

double LogitRow::weight_sums(std::vector<double>* sums) const {
    sums->resize(num_runs(size));
    kernels.weight_sums(logits, size, peak, factor, sums->data());
    return total_of(*sums);
}

double run_sums(const SamplingKernels& kernels, const float* weights, int64_t count,
                std::vector<double>* sums) {
    sums->resize(num_runs(count));
    kernels.run_sums(weights, count, sums->data());
    return total_of(*sums);
}

int64_t keep_largest_logits(const LogitRow& row, int64_t top_k, float least_logit,
                            SamplingScratch& scratch) {
    const float bound = top_k < row.size ? bound_of(row, top_k, scratch.values) : -INFINITY;
    const int64_t candidates = take_at_least(row, std::max(bound, least_logit), scratch);
    const int64_t count = keep_largest(candidates, top_k, scratch);
    weigh(row, count, scratch);
    return count;
}

int64_t keep_nucleus(const LogitRow& row, double top_p, SamplingScratch& scratch) {
    const double total = row.weight_sums(&scratch.sums), wanted = top_p * total;
    const float likely = bound_of(row, likely_nucleus, scratch.values);
    int64_t count = take_at_least(row, likely, scratch);
    weigh(row, count, scratch);
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += scratch.weights[i];
    if (sum < wanted && likely > -INFINITY) {
        // Those left out are together at most half of what a nucleus may leave out. Rounded down,
        // lest the bound rounds above a logit that it should let in.
        const double least_weight = (total - wanted) / 2 / double(row.size);
        const double bound = double(row.peak) + std::log(least_weight) / row.factor;
        count = take_at_least(row, std::nextafter(float(bound), -INFINITY), scratch);
        weigh(row, count, scratch);
    }
    return keep_until(wanted, count, scratch);
}

int64_t keep_nucleus(const LogitRow& row, double top_p, int64_t count, SamplingScratch& scratch) {
    const double total = run_sums(row.kernels, scratch.weights.data(), count, &scratch.sums);
    return keep_until(top_p * total, count, scratch);
}

}  // namespace inflight
