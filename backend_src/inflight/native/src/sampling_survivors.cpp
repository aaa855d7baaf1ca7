// Thresholds without a sort: the maxima of columns bound the k-th largest value from below, and the
// border of a nucleus is looked for among buckets of weights.
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

// Weights share a bucket when their exponents and the first six bits of their fractions are the
// same: it is 1.6% wide.
constexpr int bucket_shift = 17;
constexpr int32_t last_bucket = (0x3f800000 >> bucket_shift) + 1;  // above 1

float least_of(int32_t bucket) {
    const int32_t bits = bucket << bucket_shift;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
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

// The last bucket which with those above it sums to `wanted`, or else the first.
int32_t border_of(const SamplingKernels& kernels, const float* weights, int64_t count,
                  double wanted) {
    int32_t border = 0, beyond = last_bucket + 1;
    while (border + 1 < beyond) {
        const int32_t middle = (border + beyond) / 2;
        const bool is_enough = kernels.sum_at_least(weights, count, least_of(middle)) >= wanted;
        (is_enough ? border : beyond) = middle;
    }
    return border;
}

// The fewest largest weights that sum to `wanted`: all of the buckets above one, and of that one
// the largest, at least one.
int64_t keep_until(const SamplingKernels& kernels, double wanted, int64_t count,
                   SamplingScratch& scratch) {
    float* weights = scratch.weights.data();
    const int32_t border = border_of(kernels, weights, count, wanted);
    const float above = least_of(border + 1);
    scratch.places.resize(count);
    scratch.places.resize(
        kernels.at_least(weights, count, least_of(border), scratch.places.data()));

    std::vector<int32_t>& ranked = scratch.ranked;  // the border's own places
    ranked.clear();
    for (const int32_t place : scratch.places)
        if (weights[place] < above) ranked.push_back(place);
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
    double reached = kernels.sum_at_least(weights, count, above);
    size_t taken = 0;
    while (taken < ranked.size() && (taken == 0 || reached < wanted))
        reached += weights[ranked[taken++]];
    const float last = taken ? weights[ranked[taken - 1]] : above;
    const int32_t last_place = taken ? ranked[taken - 1] : int32_t(count);

    int64_t kept = 0;
    for (const int32_t place : scratch.places) {
        const float weight = weights[place];
        if (weight < last || (weight == last && place > last_place)) continue;
        scratch.ids[kept] = scratch.ids[place];
        weights[kept++] = weight;
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
    return keep_until(row.kernels, wanted, count, scratch);
}

int64_t keep_nucleus(const LogitRow& row, double top_p, int64_t count, SamplingScratch& scratch) {
    const double total = run_sums(row.kernels, scratch.weights.data(), count, &scratch.sums);
    return keep_until(row.kernels, top_p * total, count, scratch);
}

}  // namespace inflight
