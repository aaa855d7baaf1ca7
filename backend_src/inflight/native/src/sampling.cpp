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

// The numbers are those of sampling.py.
enum class LogProb : int64_t { none = 0, of_all = 1, of_survivors = 2 };

// The rules of a row, and what they choose. The fields are those of sampling.py.
struct SampledRow {
    int64_t row;           // which one of the logits
    int64_t token_id;      // the likeliest; then the chosen one
    int64_t top_k;         // size: no such rule
    LogProb log_prob_kind;
    double temperature;    // 0: the likeliest is chosen
    double top_p;          // 1: no such rule
    double min_p_offset;   // of the least logit from the largest; -inf: no such rule
    double uniform;        // [0, 1)
    double log_prob;       // written; 0 where none is wanted
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

Choice draw(const LogitRow& row, const SampledRow& rules, SamplingScratch& scratch) {
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

void sample(const SamplingKernels& kernels, const float* logits, int64_t size, SampledRow* rules,
            SamplingScratch& scratch) {
    const float peak = logits[rules->token_id];
    Choice choice{rules->token_id, 1, 1};
    if (rules->temperature > 0) {
        const LogitRow row{kernels, logits, size, peak, float(1 / rules->temperature)};
        choice = draw(row, *rules, scratch);
    }
    rules->token_id = choice.token_id;
    rules->log_prob = 0;
    if (rules->log_prob_kind == LogProb::of_survivors)
        rules->log_prob = std::log(choice.weight / choice.total);
    if (rules->log_prob_kind == LogProb::of_all) {
        const LogitRow row{kernels, logits, size, peak, 1};
        const double total = row.weight_sums(&scratch.sums);
        rules->log_prob = double(logits[choice.token_id]) - peak - std::log(total);
    }
}

}  // namespace
}  // namespace inflight

using namespace inflight;

// token_ids[i] = the first of the largest of logits[rows[i]][size], or the first NaN.
INFLIGHT_API void inflight_likeliest(const float* logits, int64_t size, const int64_t* rows,
                                     int64_t num_rows, int32_t* token_ids) {
    const SamplingKernels& kernels = *versions.chosen();
    over_rows(num_rows, size, [&](int64_t i) {
        token_ids[i] = int32_t(kernels.likeliest(logits + rows[i] * size, size));
    });
}

// Chooses a token for each of `num_rows` SampledRow; their logits have no NaN, and finite maxima.
INFLIGHT_API void inflight_sample_rows(const float* logits, int64_t size, void* rows,
                                       int64_t num_rows) {
    const SamplingKernels& kernels = *versions.chosen();
    over_rows(num_rows, size, [&](int64_t i) {
        static thread_local SamplingScratch scratch;
        SampledRow* rules = static_cast<SampledRow*>(rows) + i;
        sample(kernels, logits + rules->row * size, size, rules, scratch);
    });
}
