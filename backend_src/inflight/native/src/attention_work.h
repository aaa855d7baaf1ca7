// The work of one iteration, cut into items for a team of threads.
#pragma once

#include <vector>

#include "attention.h"

namespace inflight {

struct Work {
    int64_t group, window;
    std::vector<WorkItem> items;  // dearest first: threads take them in this order
    std::vector<Merge> merges;
    int64_t num_partials = 0;
    int64_t cost = 0;
};

// `sequences` outlives the result. Every row is in one item, or in the parts of one merge.
Work divide(const std::vector<Sequence>& sequences, const KvShape& shape, int64_t group,
            int64_t window, int team);

}  // namespace inflight
