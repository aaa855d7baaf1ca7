// One work item: its rows in strips, against one tile of keys after another.
//
// The products are a parameter: `Products` names the types of query, storage and weights and has
//   readable(shape, tile, scratch)               the tile as the other two take it
//   scores(shape, query, rows, tile, scores)     scores [rows][key_tile] = query . keys
//   accumulate(shape, weights, rows, tile, sums) sums [rows][head_dim] += weights . values
//   stay_awake()                                 called where long work comes between the two
// `scores` may leave anything in the place of keys that the tile does not have. `accumulate` must
// not let a value in whose key is not there: what an unused slot holds may be NaN.
#pragma once

#include "attention_softmax.h"

namespace inflight {
namespace {

// The keys of a tile lie in one block or in several; groups of 16 never straddle two.
template <class Storage>
struct Tile {
    static constexpr int max_groups = key_tile / key_group;
    const Storage* keys[max_groups];
    const Storage* values[max_groups];
    int64_t key_stride;  // dimension i of K, even in pairs, starts i * key_stride elements further
    int64_t first_key;
    int num_groups, num_keys;
    const Tile* next;  // the tile after this one: a kernel may ask for its memory early; or null
};

template <class Storage>
Tile<Storage> tile_at(const LayerCall& call, const WorkItem& item, int64_t first_key) {
    const KvShape& shape = call.shape;
    Tile<Storage> tile;
    tile.next = nullptr;
    tile.first_key = first_key;
    tile.key_stride = shape.tokens_per_block;
    tile.num_keys = int(item.key_end - first_key < key_tile ? item.key_end - first_key : key_tile);
    tile.num_groups = (tile.num_keys + key_group - 1) / key_group;
    for (int g = 0; g < tile.num_groups; ++g) {
        const int64_t key = first_key + g * key_group;
        const int64_t block = item.sequence->blocks[key / shape.tokens_per_block];
        const int64_t slot = key % shape.tokens_per_block;
        const auto panel = [&](bool is_value) {
            return panel_of<Storage>(shape, call.storage, block, item.kv_head, is_value);
        };
        tile.keys[g] = panel(false) + slot * pair_size<Storage>;
        tile.values[g] = panel(true) + slot * shape.head_dim;
    }
    return tile;
}

// The scales of a tile's keys; 0 for keys that are not there, so that nothing of them is left.
void gather_scales(const LayerCall& call, const WorkItem& item, const Tile<int8_t>& tile,
                   Scratch& scratch) {
    const KvShape& shape = call.shape;
    for (int at = 0; at < key_tile; at += key_group) {
        const int present = tile.num_keys - at < key_group ? tile.num_keys - at : key_group;
        const int64_t key = tile.first_key + at, slot = key % shape.tokens_per_block;
        const auto gather = [&](bool is_value, float* to) {
            if (present <= 0) return store(to + at, f32x16{});
            const int64_t block = item.sequence->blocks[key / shape.tokens_per_block];
            int8_t* panel = panel_of<int8_t>(shape, call.storage, block, item.kv_head, is_value);
            const float* from = scales_of(shape, panel) + slot;
            if (present == key_group) return store(to + at, load(from));
            for (int i = 0; i < key_group; ++i) to[at + i] = i < present ? from[i] : 0.0f;
        };
        gather(false, scratch.key_scales);
        gather(true, scratch.value_scales);
    }
}

inline int64_t position_of(const LayerCall& call, const WorkItem& item, int row) {
    const Sequence& sequence = *item.sequence;
    const int64_t first = sequence.context_length - sequence.num_queries;
    return first + (item.first_row + row) / call.group;
}

// Takes the scores that a row does not see out of the running.
void hide(const LayerCall& call, const WorkItem& item, const Strip& strip, int64_t first_key,
          float* scores) {
    const int64_t window = call.rules->window;
    const auto in_tile = [&](int64_t key) {
        return int(key < first_key ? 0 : key > first_key + key_tile ? key_tile : key - first_key);
    };
    for (int row = 0; row < strip.num_rows; ++row) {
        const int64_t position = position_of(call, item, strip.first_row + row);
        const int end = in_tile(position + 1 < item.key_end ? position + 1 : item.key_end);
        const int begin = window ? in_tile(position - window + 1) : 0;
        float* of_row = scores + row * key_tile;
#pragma omp simd
        for (int i = 0; i < key_tile; ++i)
            of_row[i] = i >= begin && i < end ? of_row[i] : -__builtin_inff();
    }
}

bool all_visible(const LayerCall& call, const WorkItem& item, const Strip& strip,
                 int64_t first_key) {
    const int64_t end = first_key + key_tile;
    const int64_t first = position_of(call, item, strip.first_row);
    const int64_t last = position_of(call, item, strip.first_row + strip.num_rows - 1);
    const bool none_later = end <= item.key_end && end - 1 <= first;
    return none_later && (!call.rules->window || first_key > last - call.rules->window);
}

void scale_keys(const float* scales, int rows, float* scores) {
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < key_tile; i += lanes) {
            float* at = scores + row * key_tile + i;
            store(at, load(at) * load(scales + i));
        }
}

void cap(float softcap, float scale, int rows, float* scores) {
    for (int i = 0; i < rows * key_tile; i += lanes)
        store(scores + i, softcap * tanh(load(scores + i) * (scale / softcap)));
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
        const float total = sum(load(scratch.totals[row]));
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

// Keys of a tile that some row of the strip sees; 0 or less: none.
inline int64_t num_seen(const LayerCall& call, const WorkItem& item, const Strip& strip,
                        int64_t first_key) {
    return position_of(call, item, strip.first_row + strip.num_rows - 1) + 1 - first_key;
}

// The tile without the keys after the first so many.
template <class Storage>
Tile<Storage> narrowed(Tile<Storage> tile, int64_t num_keys) {
    if (num_keys >= tile.num_keys) return tile;
    tile.num_keys = int(num_keys);
    tile.num_groups = (tile.num_keys + key_group - 1) / key_group;
    return tile;
}

template <class Products, class Readable>
void attend_strip(const LayerCall& call, const WorkItem& item, const Strip& strip,
                  const Readable& tile, Scratch& scratch) {
    using Weight = typename Products::Weight;
    constexpr bool scaled = is_scaled<typename Products::Storage>;
    const LayerRules& rules = *call.rules;
    const int64_t size = call.shape.head_dim;
    const int64_t tokens_before = item.kv_head * call.num_tokens + item.sequence->first_token;
    const auto* query = static_cast<const typename Products::Query*>(call.query) +
                        (tokens_before * call.group + item.first_row + strip.first_row) * size;
    Products::scores(call.shape, query, strip.num_rows, tile, scratch.scores);
    if (scaled) scale_keys(scratch.key_scales, strip.num_rows, scratch.scores);
    if (rules.softcap != 0.0f) {
        cap(rules.softcap, rules.scale, strip.num_rows, scratch.scores);
        Products::stay_awake();
    }
    if (!all_visible(call, item, strip, tile.first_key))
        hide(call, item, strip, tile.first_key, scratch.scores);
    const float factor = (rules.softcap != 0.0f ? 1.0f : rules.scale) * log2_e;
    soften<Weight>(strip, tile.num_keys, factor, size, scaled ? scratch.value_scales : nullptr,
                   scratch);
    Products::accumulate(call.shape, weights_of<Weight>(scratch), strip.num_rows, tile,
                         strip.sums);
}

// `following`: the item that is likely to come next, or null.
template <class Products>
void attend_item(const LayerCall& call, const WorkItem& item, const WorkItem* following,
                 Scratch& scratch) {
    using Storage = typename Products::Storage;
    const int64_t size = call.shape.head_dim;
    const int rows = item.num_rows;
    for (int row = 0; row < rows; ++row) scratch.tops[row] = lowest_score;
    memset(scratch.totals, 0, rows * sizeof scratch.totals[0]);
    memset(scratch.sums, 0, rows * size * sizeof(float));
    Products::begin(rows);
    Tile<Storage> next = tile_at<Storage>(call, item, item.key_begin);
    for (int64_t key = item.key_begin; key < item.key_end; key += key_tile) {
        Tile<Storage> tile = next;
        if (key + key_tile < item.key_end) {
            next = tile_at<Storage>(call, item, key + key_tile);
            tile.next = &next;
        } else if (following) {
            next = tile_at<Storage>(call, *following, following->key_begin);
            tile.next = &next;
        }
        if constexpr (is_scaled<Storage>) gather_scales(call, item, tile, scratch);
        const auto readable = Products::readable(call.shape, tile, scratch);
        for (int row = 0; row < rows; row += strip_rows) {
            const int num_rows = rows - row < strip_rows ? rows - row : strip_rows;
            const Strip strip{row, num_rows, scratch.sums + row * size, scratch.totals[row],
                              scratch.tops + row};
            const int64_t seen = num_seen(call, item, strip, key);
            if (seen > 0)
                attend_strip<Products>(call, item, strip, narrowed(readable, seen), scratch);
        }
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
