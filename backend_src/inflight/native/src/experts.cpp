// Mixtures of experts: which rows go to which experts, the linears of all experts, and the sum of
// what comes back. The arrays are those of experts.py.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dispatch.h"
#include "team.h"

extern "C" void inflight_linear(const void* packed, const void* x, int64_t num_rows, void* y,
                                int64_t how);  // linear.cpp

namespace inflight {
namespace {

// Numbers to look at below which a second thread costs more than it does.
constexpr int64_t worth_a_team = 16384;

template <class Row>
void over_rows(int64_t num_rows, int64_t width, const Row& row) {
    const int64_t team = num_rows * width < worth_a_team ? 1 : team_size();
    Pieces pieces(num_rows, 2 * team);
    with_team(int(team), [&](int) {
        for (Pieces::Run run; !(run = pieces.take()).empty();)
            for (int64_t i = run.first; i < run.last; ++i) row(i);
    });
}

// The experts of the largest logits, largest first, and of equal ones the lower number first. They
// are always as many as asked for and all different, whatever the logits are, NaN included.
void choose(const float* logits, int64_t num_experts, int64_t num_chosen, int64_t* chosen) {
    int64_t found = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        int64_t at = found;
        while (at > 0 && logits[expert] > logits[chosen[at - 1]]) --at;
        if (at == num_chosen) continue;
        found = std::min(found + 1, num_chosen);
        for (int64_t i = found - 1; i > at; --i) chosen[i] = chosen[i - 1];
        chosen[at] = expert;
    }
}

struct Router {
    const float* logits;  // [num_rows][num_experts + num_shared]
    int64_t num_rows, num_experts, num_chosen, num_shared;
    bool is_softmax_of_chosen;
    float* weights;   // [num_rows][num_chosen + num_shared]
    int64_t* places;  // the same

    int64_t num_results() const { return num_chosen + num_shared; }

    // The weights of a row; its places are numbers of experts at first.
    void weigh(int64_t row) const {
        const float* own = logits + row * (num_experts + num_shared);
        float* weight = weights + row * num_results();
        int64_t* place = places + row * num_results();
        choose(own, num_experts, num_chosen, place);
        const float largest = own[place[0]];
        float sum = 0;
        for (int64_t i = 0; i < num_chosen; ++i)
            sum += weight[i] = std::exp(own[place[i]] - largest);
        if (!is_softmax_of_chosen) {
            sum = 0;
            for (int64_t i = 0; i < num_experts; ++i) sum += std::exp(own[i] - largest);
        }
        for (int64_t i = 0; i < num_chosen; ++i) weight[i] /= sum;
        if (num_shared) {
            weight[num_chosen] = 1 / (1 + std::exp(-own[num_experts]));
            place[num_chosen] = num_rows * num_chosen + row;
        }
    }

    // Numbers of experts become places: the rows of an expert lie together, in their own order.
    void group(int64_t* tokens, int64_t* ends) const {
        std::fill_n(ends, num_experts, 0);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t i = 0; i < num_chosen; ++i) ++ends[places[row * num_results() + i]];
        for (int64_t expert = 0, start = 0; expert < num_experts; ++expert) {
            const int64_t count = ends[expert];
            ends[expert] = start;
            start += count;
        }
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t i = 0; i < num_chosen; ++i) {
                int64_t& place = places[row * num_results() + i];
                place = ends[place]++;
                tokens[place] = row;
            }
    }
};

struct Combination {
    const float* results;  // [.][width]
    const float* weights;  // [rows][num_results]
    const int64_t* places;  // the same
    int64_t num_results, width;
    float* out;  // [rows][width]
    bool accumulate;

    void combine(int64_t row) const {
        float* sum = out + row * width;
        if (!accumulate) std::fill_n(sum, width, 0.0f);
        for (int64_t i = row * num_results; i < (row + 1) * num_results; ++i) {
            const float weight = weights[i];
            const float* result = results + places[i] * width;
            for (int64_t column = 0; column < width; ++column)
                sum[column] += weight * result[column];
        }
    }
};

}  // namespace
}  // namespace inflight

using namespace inflight;

// Fills the arrays of a Routing.
INFLIGHT_API void inflight_route(const float* logits, int64_t num_rows, int64_t num_experts,
                                 int64_t num_chosen, int64_t num_shared,
                                 int64_t is_softmax_of_chosen, float* weights, int64_t* places,
                                 int64_t* tokens, int64_t* ends) {
    const Router router{logits, num_rows, num_experts, num_chosen, num_shared,
                        is_softmax_of_chosen != 0, weights, places};
    over_rows(num_rows, num_experts, [&](int64_t row) { router.weigh(row); });
    router.group(tokens, ends);
}

// Rows of y from the same rows of x, each group by weights of its own; those of a group without
// rows are not read. `how` is that of inflight_linear.
INFLIGHT_API void inflight_linear_groups(const void* const* packed, const int64_t* ends,
                                         int64_t num_groups, const void* x, int64_t x_row_bytes,
                                         void* y, int64_t y_row_bytes, int64_t how) {
    int64_t start = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t end = ends[group];
        if (end > start)
            inflight_linear(packed[group], static_cast<const char*>(x) + start * x_row_bytes,
                            end - start, static_cast<char*>(y) + start * y_row_bytes, how);
        start = end;
    }
}

// Each row of out is the weighted sum of its results, or that is added to it.
INFLIGHT_API void inflight_combine(const float* results, const float* weights,
                                   const int64_t* places, int64_t num_rows, int64_t num_results,
                                   int64_t width, float* out, int64_t accumulate) {
    const Combination op{results, weights, places, num_results, width, out, accumulate != 0};
    over_rows(num_rows, num_results * width, [&](int64_t row) { op.combine(row); });
}
