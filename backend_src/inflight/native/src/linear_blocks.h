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

// Asks for the weights that are read next but one group or so. With few rows memory is what a
// product waits for, and the processor's own prefetching stops at every 4 KiB.
template <int64_t size>
void prefetch_ahead(const uint8_t* weights) {
    constexpr int64_t distance = 4096, line = 64;
    for (int64_t i = 0; i < size; i += line) __builtin_prefetch(weights + distance + i);
}

}  // namespace
}  // namespace inflight
