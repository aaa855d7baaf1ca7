#include "attention_work.h"

#include <algorithm>

namespace inflight {
namespace {

// Parts per thread: few enough that merging costs nothing, many enough that nobody waits long.
constexpr int64_t parts_per_thread = 8;

// Proportional to time, roughly: loading a key costs as much as eight rows of products with it.
int64_t cost(const WorkItem& item) { return (item.key_end - item.key_begin) * (8 + item.num_rows); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// All keys that some row of the tile sees, from the beginning of a block on, or of a tile in a longer
// block: what lies in blocks before the window may be anything.
WorkItem whole_item(const Sequence& sequence, int64_t kv_head, int64_t first_row, int64_t num_rows,
                    int64_t group, int64_t window, int64_t tokens_per_block) {
    const int64_t first_position = sequence.context_length - sequence.num_queries;
    const int64_t first = first_position + first_row / group;
    const int64_t last = first_position + (first_row + num_rows - 1) / group;
    const int64_t begin = window ? std::max<int64_t>(first - window + 1, 0) : 0;
    const int64_t unit = std::min<int64_t>(key_tile, tokens_per_block);
    return {&sequence, int32_t(kv_head), int32_t(first_row), int32_t(num_rows),
            begin / unit * unit, last + 1, false, 0};
}

void add(Work& work, const WorkItem& item, int64_t dearest) {
    const int64_t tiles = ceil_div(item.key_end - item.key_begin, key_tile);
    const int64_t parts = std::min(ceil_div(cost(item), dearest), tiles);
    if (parts == 1) return work.items.push_back(item);
    work.merges.push_back({item.sequence, item.kv_head, item.first_row, item.num_rows,
                           work.num_partials, parts});
    for (int64_t part = 0; part < parts; ++part) {
        WorkItem piece = item;
        piece.key_begin = item.key_begin + tiles * part / parts * key_tile;
        piece.key_end =
            std::min(item.key_end, item.key_begin + tiles * (part + 1) / parts * key_tile);
        piece.is_part = true;
        piece.partial = work.num_partials++;
        work.items.push_back(piece);
    }
}

}  // namespace

Work divide(const std::vector<Sequence>& sequences, const KvShape& shape, int64_t group,
            int64_t window, int team) {
    Work work;
    work.group = group;
    work.window = window;
    std::vector<WorkItem> whole;
    for (const Sequence& sequence : sequences) {
        const int64_t rows = sequence.num_queries * group;
        for (int64_t head = 0; head < shape.num_kv_heads; ++head)
            for (int64_t row = 0; row < rows; row += max_item_rows) {
                const int64_t count = std::min<int64_t>(max_item_rows, rows - row);
                whole.push_back(whole_item(sequence, head, row, count, group, window,
                                           shape.tokens_per_block));
                work.cost += cost(whole.back());
            }
    }
    const int64_t dearest =
        team == 1 ? work.cost + 1 : std::max<int64_t>(work.cost / (team * parts_per_thread), 1);
    for (const WorkItem& item : whole) add(work, item, dearest);
    std::stable_sort(work.items.begin(), work.items.end(),
                     [](const WorkItem& a, const WorkItem& b) { return cost(a) > cost(b); });
    return work;
}

}  // namespace inflight
