// Rows cut into blocks whose sizes the compiler knows, so that their sums stay in registers.
#pragma once

#include <cstdint>

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

// Calls block(Count<n>, first) over all of `num_rows`. No block has more than `most` of them, and
// their sizes differ by at most one: a small rest would use the registers badly.
template <int most, class Block>
void in_blocks(int64_t num_rows, const Block& block) {
    int64_t row = 0;
    for (int64_t left = (num_rows + most - 1) / most; left > 0; --left) {
        const int count = int((num_rows - row + left - 1) / left);
        with_count<most>(count, [&](auto rows) { block(rows, row); });
        row += count;
    }
}

}  // namespace
}  // namespace inflight
