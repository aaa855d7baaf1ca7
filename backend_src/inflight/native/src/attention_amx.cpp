// bf16 storage: products of 16 x 32 and 32 x 16 tiles, for head sizes and blocks that are multiples
// of 32.
#include <immintrin.h>

#include "attention_flash.h"

namespace inflight {
namespace amx {
namespace {

constexpr int tile_rows = 16, tile_depth = 32;

// Tiles 0-3 are sums, [row half][column half]; 4 and 5 the left factors, 6 and 7 the right ones.
struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Where two tiles lie: the second `step` elements after the first, rows `stride` bytes apart.
struct Factors {
    const bf16* at;
    int64_t step, stride;
    const bf16* ahead = nullptr;  // factors that come next, to be fetched meanwhile
};

inline void prefetch(const bf16* at, const Factors& like) {
    for (int row = 0; row < tile_rows; ++row) {
        const char* line = reinterpret_cast<const char*>(at) + row * like.stride;
        _mm_prefetch(line, _MM_HINT_T1);
        _mm_prefetch(line + like.step * sizeof(bf16), _MM_HINT_T1);
    }
}

// Adds left . right to tiles 0-3, or to 0 and 1 where there is one half of the rows alone.
inline void multiply(bool both_halves, const Factors& left, const Factors& right) {
    if (right.ahead) prefetch(right.ahead, right);
    _tile_loadd(4, left.at, left.stride);
    _tile_loadd(6, right.at, right.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right.at + right.step, right.stride);
    _tile_dpbf16ps(1, 4, 7);
    if (!both_halves) return;
    _tile_loadd(5, left.at + left.step, left.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

inline void store_sums(bool both_halves, float* to, int64_t row_elements) {
    const int64_t stride = row_elements * sizeof(float);
    _tile_stored(0, to, stride);
    _tile_stored(1, to + 16, stride);
    if (!both_halves) return;
    _tile_stored(2, to + tile_rows * row_elements, stride);
    _tile_stored(3, to + tile_rows * row_elements + 16, stride);
}

inline void load_sums(bool both_halves, const float* from, int64_t row_elements) {
    const int64_t stride = row_elements * sizeof(float);
    _tile_loadd(0, from, stride);
    _tile_loadd(1, from + 16, stride);
    if (!both_halves) return;
    _tile_loadd(2, from + tile_rows * row_elements, stride);
    _tile_loadd(3, from + tile_rows * row_elements + 16, stride);
}

struct TileProducts {
    using Query = bf16;
    using Storage = bf16;
    using Weight = bf16;
    static constexpr int group_multiple = 2;

    static void begin() {
        const TileConfiguration configuration;
        _tile_loadconfig(&configuration);
    }

    static void end() { _tile_release(); }

    // Few rows wait for memory, and many for the arithmetic: only the few fetch ahead.
    static const Tile<bf16>* to_fetch(const Tile<bf16>& tile, int group, int rows) {
        const Tile<bf16>* next = tile.next;
        return next && group < next->num_groups && rows <= tile_rows ? next : nullptr;
    }

    // Whole tiles of rows are read and written; the query buffer and the scratch have room for it.
    static void scores(const KvShape& shape, const bf16* query, int rows, const Tile<bf16>& tile,
                       float* scores) {
        const int64_t size = shape.head_dim, per_block = shape.tokens_per_block;
        const bool both_halves = rows > tile_rows;
        for (int group = 0; group < tile.num_groups; group += 2) {
            const Tile<bf16>* next = to_fetch(tile, group, rows);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < size; i += tile_depth) {
                const int64_t at = i * per_block;
                multiply(both_halves, {query + i, tile_rows * size, size * 2},
                         {tile.keys[group] + at, key_group * 2, per_block * 4,
                          next ? next->keys[group] + at : nullptr});
            }
            store_sums(both_halves, scores + group * key_group, key_tile);
        }
    }

    static void accumulate(const KvShape& shape, int rows, const Tile<bf16>& tile,
                           Scratch& scratch) {
        const int64_t size = shape.head_dim;
        const bool both_halves = rows > tile_rows;
        rescale(rows, size, scratch);
        const bf16* values[Tile<bf16>::max_groups / 2];
        for (int group = 0; group < tile.num_groups; group += 2)
            values[group / 2] = whole_values(shape, tile, group, scratch);
        for (int64_t dim = 0; dim < size; dim += 2 * lanes) {
            load_sums(both_halves, scratch.sums + dim, size);
            for (int group = 0; group < tile.num_groups; group += 2) {
                const Tile<bf16>* next = to_fetch(tile, group, rows);
                multiply(both_halves,
                         {scratch.weights + group * key_group, tile_rows * key_tile, key_tile * 2},
                         {values[group / 2] + dim * 2, lanes * 2, size * 4,
                          next ? next->values[group] + dim * 2 : nullptr});
            }
            store_sums(both_halves, scratch.sums + dim, size);
        }
    }

    static void rescale(int rows, int64_t size, Scratch& scratch) {
        for (int row = 0; row < rows; ++row) {
            const float factor = scratch.rescale[row];
            if (factor == 1.0f) continue;
            float* sums = scratch.sums + row * size;
            for (int64_t i = 0; i < size; i += lanes) store(sums + i, load(sums + i) * factor);
        }
    }

    // The values of 32 keys, or a copy with zeros for those that are not there.
    static const bf16* whole_values(const KvShape& shape, const Tile<bf16>& tile, int group,
                                    Scratch& scratch) {
        const int present = tile.num_keys - group * key_group;
        if (present >= tile_depth) return tile.values[group];
        const int64_t size = shape.head_dim;
        memset(scratch.values, 0, tile_depth * size * sizeof(bf16));
        memcpy(scratch.values, tile.values[group], present / 2 * size * 2 * sizeof(bf16));
        if (present % 2)
            for (int64_t i = (present - 1) * size; i < (present + 1) * size; i += 2)
                scratch.values[i] = tile.values[group][i];
        return scratch.values;
    }
};

}  // namespace

void attend(const LayerCall& call, const WorkItem& item, Scratch& scratch) {
    attend_item<TileProducts>(call, item, scratch);
}

}  // namespace amx
}  // namespace inflight
