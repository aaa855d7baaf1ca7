// The C functions of sampling.py: the likeliest of each row of logits, and a token for each row by
// its rules. Rows are shared out over the team; what comes of one knows nothing of the others.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch.h"
#include "sampling_survivors.h"
#include "team.h"

namespace inflight {
namespace {

constexpr Versions<const SamplingKernels*> versions{
    &portable::sampling, INFLIGHT_IF_AVX2(&avx2::sampling), INFLIGHT_IF_AVX512(&avx512::sampling),
    nullptr};

// Logits to look at below which a second thread costs more than it does.
constexpr int64_t worth_a_team = 32768;

template <class Body>
void over_rows(int64_t num_rows, int64_t size, const Body& body) {
    const int64_t team = num_rows < 2 || num_rows * size < worth_a_team ? 1 : team_size();
    Pieces pieces(num_rows, 2 * team);
    with_team(int(team), [&](int) {
        for (Pieces::Run run; !(run = pieces.take()).empty();)
            for (int64_t i = run.first; i < run.last; ++i) body(i);
    });
}

// Those of the row that the calling thread has; kept from row to row.
std::vector<float>& maxima_here() {
    static thread_local std::vector<float> maxima;
    return maxima;
}

// Leaves the row's maxima.
int64_t likeliest_of(const SamplingKernels& kernels, const float* values, int64_t size,
                     std::vector<float>& maxima) {
    maxima.resize(most_maxima(size));
    maxima.resize(kernels.maxima(values, size, maxima.data()));
    return kernels.likeliest(values, size, maxima.data(), maxima.size());
}

// How a row is sampled: an element of the array of rules that sampling.py is given.
struct RowRules {
    double temperature;      // 0: the likeliest is chosen
    int32_t top_k;           // size: no such rule
    double top_p;            // 1: no such rule
    double min_p_offset;     // of the least logit from the largest; -inf: no such rule
    float penalties[3];      // the logits have them
    int32_t wants_log_prob;
    uint64_t seed;           // the uniform number comes from it
    double uniform;          // [0, 1)
};

// What comes of the rows; of those whose largest logit is not finite, only that.
struct SampledRows {
    int32_t* token_ids;
    float* log_probs;  // 0 where none is wanted
    float* maxima;     // the largest logits, NaN where there is one
};

struct Choice {
    int64_t token_id;
    double weight, total;  // its own, and that of all that survive
};

// The run in which cumulative sums exceed `target`, or the last one; `before` is the sum of those
// that come first.
int64_t run_at(const std::vector<double>& sums, double target, double* before) {
    int64_t run = 0;
    for (*before = 0; run + 1 < int64_t(sums.size()) && *before + sums[run] <= target; ++run)
        *before += sums[run];
    return run;
}

// The place in a run of `count` weights; never one of weight 0.
int64_t place_at(const float* weights, int64_t count, double target, double before) {
    int64_t last = 0;
    for (int64_t place = 0; place < count; ++place) {
        if (weights[place] > 0) last = place;
        before += weights[place];
        if (before > target) return place;
    }
    return last;  // the two sums of a run differ in their last bits
}

// uniform * total may round up to the total itself; every run must stay reachable.
double target_of(double uniform, double total) {
    return std::min(uniform * total, std::nextafter(total, 0.0));
}

Choice choose_of_all(const LogitRow& row, double uniform, SamplingScratch& scratch) {
    const double total = row.weight_sums(&scratch.sums);
    const double target = target_of(uniform, total);
    double before;
    const int64_t begin = sampling_run * run_at(scratch.sums, target, &before);
    const int64_t count = std::min(sampling_run, row.size - begin);
    float weights[sampling_run];
    row.kernels.weights(row.logits + begin, count, row.peak, row.factor, weights);
    const int64_t place = place_at(weights, count, target, before);
    return {begin + place, weights[place], total};
}

Choice choose_of_survivors(const LogitRow& row, int64_t num, double uniform,
                           SamplingScratch& scratch) {
    const double total = run_sums(row.kernels, scratch.weights.data(), num, &scratch.sums);
    const double target = target_of(uniform, total);
    double before;
    const int64_t begin = sampling_run * run_at(scratch.sums, target, &before);
    const float* weights = scratch.weights.data() + begin;
    const int64_t place = place_at(weights, std::min(sampling_run, num - begin), target, before);
    return {scratch.ids[begin + place], weights[place], total};
}

Choice draw(const LogitRow& row, const RowRules& rules, SamplingScratch& scratch) {
    const float least_logit = float(double(row.peak) + rules.min_p_offset);
    const bool are_cut = rules.top_k < row.size || least_logit > -INFINITY;
    if (!are_cut && rules.top_p >= 1) return choose_of_all(row, rules.uniform, scratch);
    int64_t num;
    if (are_cut) {
        num = keep_largest_logits(row, rules.top_k, least_logit, scratch);
        if (rules.top_p < 1) num = keep_nucleus(row, rules.top_p, num, scratch);
    } else {
        num = keep_nucleus(row, rules.top_p, scratch);
    }
    return choose_of_survivors(row, num, rules.uniform, scratch);
}

// Natural, of the choice among all logits, before temperature.
double log_prob_of(const Choice& choice, const LogitRow& row, SamplingScratch& scratch) {
    const double total = row.weight_sums(&scratch.sums);
    return double(row.logits[choice.token_id]) - row.peak - std::log(total);
}

void sample(const LogitRow& row, const RowRules& rules, int64_t likeliest, bool normalizes,
            SamplingScratch& scratch, int32_t* token_id, float* log_prob) {
    Choice choice{likeliest, 1, 1};
    if (rules.temperature > 0) choice = draw(row, rules, scratch);
    *token_id = int32_t(choice.token_id);
    *log_prob = 0;
    if (!rules.wants_log_prob) return;
    const LogitRow unheated{row.kernels, row.logits, row.size, row.peak, 1, row.maxima};
    *log_prob = float(normalizes ? std::log(choice.weight / choice.total)
                                 : log_prob_of(choice, unheated, scratch));
}

}  // namespace
}  // namespace inflight

using namespace inflight;

// token_ids[i] = the first of the largest of logits[rows[i]][size], or the first NaN.
INFLIGHT_API void inflight_likeliest(const float* logits, int64_t size, const int64_t* rows,
                                     int64_t num_rows, int32_t* token_ids) {
    const SamplingKernels& kernels = *versions.chosen();
    over_rows(num_rows, size, [&](int64_t i) {
        token_ids[i] = int32_t(likeliest_of(kernels, logits + rows[i] * size, size, maxima_here()));
    });
}

// Chooses a token for each row of logits[num_rows][size]. A row is in the near caches when it is
// weighed, because its thread has just looked for its largest logit.
INFLIGHT_API void inflight_sample_rows(const float* logits, int64_t size, const RowRules* rules,
                                       int64_t num_rows, int64_t normalizes,
                                       const SampledRows* sampled) {
    const SamplingKernels& kernels = *versions.chosen();
    over_rows(num_rows, size, [&](int64_t i) {
        static thread_local SamplingScratch scratch;
        std::vector<float>& maxima = maxima_here();
        const float* values = logits + i * size;
        const int64_t likeliest = likeliest_of(kernels, values, size, maxima);
        const float peak = sampled->maxima[i] = values[likeliest];
        if (!std::isfinite(peak)) return;
        const LogitRow row{kernels, values, size, peak, float(1 / rules[i].temperature), maxima};
        sample(row, rules[i], likeliest, normalizes, scratch, &sampled->token_ids[i],
               &sampled->log_probs[i]);
    });
}
