// One work item: softmax over tiles of keys, kept exact by rescaling what was summed whenever a
// larger score appears (Milakov and Gimelshein's online softmax).
//
// The products are a parameter: `Products` names the types of query, storage and weights and has
//   scores(shape, query, rows, tile, scores)     scores [rows][key_tile] = query . keys
//   accumulate(shape, rows, tile, scratch)       sums = sums * rescale + weights . values
// `scores` may fill more keys than the tile has, up to whole groups. `accumulate` must not let a
// value in whose key is not there: what an unused slot holds may be NaN.
#pragma once

#include "attention.h"
#include "common_vectors.h"

namespace inflight {
namespace {

// The keys of a tile lie in one block or in several; groups of 16 never straddle two.
template <class Storage>
struct Tile {
    static constexpr int max_groups = key_tile / key_group;
    const Storage* keys[max_groups];
    const Storage* values[max_groups];
    int num_groups, num_keys;
    const Tile* next;  // the tile after this one: a kernel may ask for its memory early; or null
};

// Lower than every score, and still a number: a row that has seen no key yet can be rescaled.
constexpr float lowest_score = -1e30f;

template <class Storage>
constexpr int pair_size = sizeof(Storage) == 2 ? 2 : 1;

template <class Products>
Tile<typename Products::Storage> tile_at(const LayerCall& call, const WorkItem& item,
                                         int64_t first_key) {
    using Storage = typename Products::Storage;
    const KvShape& shape = call.shape;
    Tile<Storage> tile;
    tile.next = nullptr;
    tile.num_keys = int(item.key_end - first_key < key_tile ? item.key_end - first_key : key_tile);
    constexpr int multiple = Products::group_multiple, keys_at_once = key_group * multiple;
    tile.num_groups = (tile.num_keys + keys_at_once - 1) / keys_at_once * multiple;
    const Storage* storage = static_cast<const Storage*>(call.storage);
    for (int g = 0; g < tile.num_groups; ++g) {
        const int64_t key = first_key + g * key_group;
        const int64_t block = item.sequence->blocks[key / shape.tokens_per_block];
        const int64_t slot = key % shape.tokens_per_block;
        const Storage* keys =
            storage + block * block_elements(shape) + item.kv_head * 2 * panel_elements(shape);
        tile.keys[g] = keys + slot * pair_size<Storage>;
        tile.values[g] = keys + panel_elements(shape) + slot * shape.head_dim;
    }
    return tile;
}

inline int64_t position_of(const LayerCall& call, const WorkItem& item, int row) {
    const Sequence& sequence = *item.sequence;
    const int64_t first = sequence.context_length - sequence.num_queries;
    return first + (item.first_row + row) / call.group;
}

// Takes the scores that a row does not see out of the running.
void hide(const LayerCall& call, const WorkItem& item, int64_t first_key, int num_groups,
          float* scores) {
    const int64_t window = call.rules->window;
    const int width = num_groups * key_group;
    const auto in_tile = [&](int64_t key) {
        return int(key < first_key ? 0 : key > first_key + width ? width : key - first_key);
    };
    for (int row = 0; row < item.num_rows; ++row) {
        const int64_t position = position_of(call, item, row);
        const int end = in_tile(position + 1 < item.key_end ? position + 1 : item.key_end);
        const int begin = window ? in_tile(position - window + 1) : 0;
        float* of_row = scores + row * key_tile;
#pragma omp simd
        for (int i = 0; i < width; ++i)
            of_row[i] = i >= begin && i < end ? of_row[i] : -__builtin_inff();
    }
}

bool all_visible(const LayerCall& call, const WorkItem& item, int64_t first_key, int num_groups) {
    const int64_t end = first_key + num_groups * key_group;
    const bool none_later = end <= item.key_end && end - 1 <= position_of(call, item, 0);
    const int64_t last = position_of(call, item, item.num_rows - 1);
    return none_later && (!call.rules->window || first_key > last - call.rules->window);
}

void cap(float softcap, float scale, int rows, int num_groups, float* scores) {
    for (int row = 0; row < rows; ++row)
        for (int g = 0; g < num_groups; ++g) {
            float* at = scores + row * key_tile + g * key_group;
            store(at, softcap * tanh(load(at) * (scale / softcap)));
        }
}

template <class Weight>
Weight* weights_of(Scratch& scratch);
template <>
inline float* weights_of<float>(Scratch& scratch) {
    return scratch.scores;  // in place of the scores
}
template <>
inline bf16* weights_of<bf16>(Scratch& scratch) {
    return scratch.weights;
}

// The weights of 2 * wide_lanes keys.
inline void store_weights(float* to, wide_float a, wide_float b) {
    write(to, a);
    write(to + wide_lanes, b);
}

#if defined(__AVX512BF16__)
// In one piece: a tile that is loaded soon after would wait for two.
inline void store_weights(bf16* to, wide_float a, wide_float b) {
    write(to, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
#endif

// Scores, in units of which `factor` make one power of two, become weights relative to each row's
// largest score so far. Groups are taken two at a time: where their number is odd, weights of one
// more are written, which nobody reads.
template <class Weight>
void soften(int rows, int num_groups, float factor, Scratch& scratch) {
    constexpr Precision precision = sizeof(Weight) == 2 ? Precision::for_bf16 : Precision::full;
    const int width = num_groups * key_group;
    for (int row = 0; row < rows; ++row) {
        const float* scores = scratch.scores + row * key_tile;
        wide_float top = read<wide_float>(scores);
        for (int i = wide_lanes; i < width; i += wide_lanes)
            top = wide_max(top, read<wide_float>(scores + i));
        const float tallest = largest(top) * factor;
        scratch.rescale[row] = tallest > scratch.tops[row] ? tallest : scratch.tops[row];
    }
    for (int row = 0; row < rows; row += wide_lanes) {
        const wide_float before = read<wide_float>(scratch.tops + row);
        const wide_float now = read<wide_float>(scratch.rescale + row);
        write(scratch.tops + row, now);
        write(scratch.rescale + row, wide_exp2<Precision::full>(before - now));
    }
    for (int row = 0; row < rows; ++row) {
        const float* scores = scratch.scores + row * key_tile;
        Weight* weights = weights_of<Weight>(scratch) + row * key_tile;
        const float top = scratch.tops[row];
        wide_float total = read<wide_float>(scratch.totals[row]) * scratch.rescale[row];
        const auto weight = [&](int i) {
            return wide_exp2<precision>(read<wide_float>(scores + i) * factor - top);
        };
        int i = 0;
        for (; i + 2 * wide_lanes <= width; i += 2 * wide_lanes) {
            const wide_float a = weight(i), b = weight(i + wide_lanes);
            total += a + b;
            store_weights(weights + i, a, b);
        }
        if (i < width) {
            const wide_float a = weight(i);
            total += a;
            store_weights(weights + i, a, wide_float{});
        }
        write(scratch.totals[row], total);
    }
}

template <class Out>
void write_result(const float* sums, float factor, int64_t size, Out* out) {
    for (int64_t i = 0; i < size; i += lanes) store(out + i, load(sums + i) * factor);
}

// `top` and `total` of all keys: the sink joins them, and the row goes out.
void finish_row(const LayerCall& call, const Sequence& sequence, int kv_head, int row,
                const float* sums, float top, float total) {
    const int64_t head = kv_head * call.group + row % call.group;
    float factor = 1.0f / total;
    if (call.rules->sinks) {
        const float sink = call.rules->sinks[head] * log2_e;
        const float tallest = sink > top ? sink : top;
        const float shrink = exp2(top - tallest);
        factor = shrink / (total * shrink + exp2(sink - tallest));
    }
    const int64_t size = call.shape.head_dim, token = sequence.first_token + row / call.group;
    const int64_t at = (token * call.shape.num_kv_heads * call.group + head) * size;
    if (call.out_is_bf16)
        write_result(sums, factor, size, static_cast<bf16*>(call.out) + at);
    else
        write_result(sums, factor, size, static_cast<float*>(call.out) + at);
}

void finish(const LayerCall& call, const WorkItem& item, const Scratch& scratch) {
    const int64_t size = call.shape.head_dim;
    for (int row = 0; row < item.num_rows; ++row) {
        const float* sums = scratch.sums + row * size;
        const float total = sum(read<wide_float>(scratch.totals[row]));
        if (!item.is_part) {
            finish_row(call, *item.sequence, item.kv_head, item.first_row + row, sums,
                       scratch.tops[row], total);
            continue;
        }
        const int64_t at = item.partial * max_item_rows + row;
        memcpy(call.partial_sums + at * size, sums, size * sizeof(float));
        call.partial_tops[at] = scratch.tops[row];
        call.partial_totals[at] = total;
    }
}

template <class Products>
void attend_item(const LayerCall& call, const WorkItem& item, Scratch& scratch) {
    using Weight = typename Products::Weight;
    const int64_t size = call.shape.head_dim, rows = item.num_rows;
    const int64_t first = item.sequence->first_token * call.group + item.first_row;
    const auto* query = static_cast<const typename Products::Query*>(call.query) +
                        (item.kv_head * call.num_tokens * call.group + first) * size;
    const LayerRules& rules = *call.rules;
    const float factor = (rules.softcap != 0.0f ? 1.0f : rules.scale) * log2_e;

    for (float& top : scratch.tops) top = lowest_score;
    memset(scratch.totals, 0, rows * sizeof scratch.totals[0]);
    memset(scratch.sums, 0, rows * size * sizeof(float));
    Products::begin();
    auto next = tile_at<Products>(call, item, item.key_begin);
    for (int64_t key = item.key_begin; key < item.key_end; key += key_tile) {
        auto tile = next;
        if (key + key_tile < item.key_end) {
            next = tile_at<Products>(call, item, key + key_tile);
            tile.next = &next;
        }
        Products::scores(call.shape, query, int(rows), tile, scratch.scores);
        if (rules.softcap != 0.0f)
            cap(rules.softcap, rules.scale, int(rows), tile.num_groups, scratch.scores);
        if (!all_visible(call, item, key, tile.num_groups))
            hide(call, item, key, tile.num_groups, scratch.scores);
        soften<Weight>(int(rows), tile.num_groups, factor, scratch);
        Products::accumulate(call.shape, int(rows), tile, scratch);
    }
    Products::end();
    finish(call, item, scratch);
}

inline void merge_parts(const LayerCall& call, const Merge& merge) {
    const int64_t size = call.shape.head_dim;
    float sums[max_head_dim];
    for (int row = 0; row < merge.num_rows; ++row) {
        float top = lowest_score, total = 0.0f;
        memset(sums, 0, sizeof sums);
        for (int64_t part = 0; part < merge.num_partials; ++part) {
            const int64_t at = (merge.first_partial + part) * max_item_rows + row;
            const float its_top = call.partial_tops[at];
            const float tallest = its_top > top ? its_top : top;
            const float keep = exp2(top - tallest);
            const float take = exp2(its_top - tallest);
            for (int64_t i = 0; i < size; i += lanes)
                store(sums + i,
                      load(sums + i) * keep + load(call.partial_sums + at * size + i) * take);
            total = total * keep + call.partial_totals[at] * take;
            top = tallest;
        }
        finish_row(call, *merge.sequence, merge.kv_head, merge.first_row + row, sums, top, total);
    }
}

}  // namespace
}  // namespace inflight
