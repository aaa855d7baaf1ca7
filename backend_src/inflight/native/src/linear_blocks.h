// What the kernels share: rows cut into blocks whose sums stay in registers, and prefetching.
#pragma once

#include "linear.h"

namespace inflight {
namespace {

template <int value_>
struct Count {
    static constexpr int value = value_;
};

template <int most, class Block>
void with_count(int count, const Block& block) {
    if (count == most)
        block(Count<most>{});
    else if constexpr (most > 1)
        with_count<most - 1>(count, block);
}

// Calls block(Count<n>, first_row) over all rows. No block has more than `most` of them, and their
// sizes differ by at most one: a small rest would use the registers badly.
template <int most, class Block>
void in_blocks(int64_t num_rows, const Block& block) {
    int64_t row = 0;
    for (int64_t left = (num_rows + most - 1) / most; left > 0; --left) {
        const int count = int((num_rows - row + left - 1) / left);
        with_count<most>(count, [&](auto rows) { block(rows, row); });
        row += count;
    }
}

// The panel for a kernel that goes through it once more.
Panel again(const Panel& panel) { return {panel.weights, panel.expanded, panel.is_expanded, {}}; }

// Fetches what a panel asks for.
class Ahead {
public:
    explicit Ahead(const Panel& panel) : fetching_(panel.fetching) {}

    // To be called once for each group of 32 along k. `own_step`: bytes of a group of the panel.
    // What is fetched at that step is about to be read, all else waits in the second-level cache.
    template <int64_t own_step>
    void fetch() {
        if (fetching_.step == own_step)
            fetch_part<own_step>(0);
        else
            for (int64_t i = 0; i < fetching_.step; i += line)
                __builtin_prefetch(fetching_.from + i, to_read, second_level);
        advance();
    }

    // The same part by part, for kernels that take long for a group: where `in_parts` says so all
    // `own_step` / `part_bytes` parts and then `advance`, else `fetch`.
    template <int64_t own_step>
    bool in_parts() const {
        return fetching_.step == own_step;
    }

    template <int64_t part_bytes>
    void fetch_part(int64_t part) const {
#pragma GCC unroll 64
        for (int64_t i = 0; i < part_bytes; i += line)
            __builtin_prefetch(fetching_.from + part * part_bytes + i, to_read, first_level);
    }

    void advance() {
        fetching_.from += fetching_.step;
        if (fetching_.from >= fetching_.end)
            fetching_.from = fetching_.then + (fetching_.from - fetching_.end);
    }

private:
    static constexpr int64_t line = 64;
    static constexpr int to_read = 0, second_level = 2, first_level = 3;
    Fetching fetching_;
};

}  // namespace
}  // namespace inflight
