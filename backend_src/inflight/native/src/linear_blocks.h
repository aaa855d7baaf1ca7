// What the kernels share: prefetching, and rows cut into blocks.
#pragma once

#include "counted.h"
#include "linear.h"

namespace inflight {
namespace {

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
        if (fetching_.from < fetching_.end) return;
        fetching_.from = fetching_.then + (fetching_.from - fetching_.end);
        fetching_.end = reinterpret_cast<const uint8_t*>(INTPTR_MAX);  // once
    }

private:
    static constexpr int64_t line = 64;
    static constexpr int to_read = 0, second_level = 2, first_level = 3;

    Fetching fetching_;
};

// The same for kernels that go through a panel several times: with each part of the products they
// fetch that share of it, so that memory is read at an even pace. All of it waits in the
// second-level cache.
class AheadByShares {
public:
    AheadByShares(const Panel& panel, int64_t num_rows)
        : fetching_(panel.fetching), due_(line * group_size * num_rows * panel_columns) {}

    // To be called before so many products of one value and one weight each.
    void fetch(int64_t num_products) {
        for (owed_ += fetching_.step * num_products; owed_ >= due_; owed_ -= due_) {
            __builtin_prefetch(fetching_.from, to_read, second_level);
            fetching_.from += line;
            if (fetching_.from < fetching_.end) continue;
            fetching_.from = fetching_.then;
            fetching_.end = reinterpret_cast<const uint8_t*>(INTPTR_MAX);  // once
        }
    }

private:
    static constexpr int64_t line = 64;
    static constexpr int to_read = 0, second_level = 2;
    Fetching fetching_;
    const int64_t due_;
    int64_t owed_ = 0;
};

}  // namespace
}  // namespace inflight
