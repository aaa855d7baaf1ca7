// bf16 products in tiles of 16 rows x 32 and 32 x 16 columns, for head sizes that are multiples of
// 32. The bf16 keys of two groups have to lie in one block.
//
// The tile unit goes to sleep after some 0.4 microseconds without work and takes 0.3 to wake up
// (measured on Sapphire Rapids). Strips of rows are small so that the softmax between two products
// ends before that; what takes longer calls stay_awake() on its way.
#include <immintrin.h>

#include "attention_expand_avx512.h"

namespace inflight {
namespace amx {
namespace {

constexpr int tile_rows = 16, tile_depth = 32, tile_columns = 16;
static_assert(strip_rows <= tile_rows, "a strip is one tile high");

// Tiles 0-3 are sums side by side, 4 is the left factor, 5 each right one. Two for these in turn
// gain nothing, and lose 5% to 8% in the slow mode of the machine in docs/performance.md.
struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    explicit TileConfiguration(int num_rows) {
        for (int tile = 0; tile < 5; ++tile) rows[tile] = uint8_t(num_rows);
        rows[5] = tile_rows;
    }
};

// A right factor of 16 pairs x 16 columns, and what is to be fetched meanwhile, or null.
struct Factor {
    const bf16 *at, *ahead;
    int64_t stride;  // between rows, in bytes
};

inline void fetch(const Factor& factor) {
    if (!factor.ahead) return;
    const char* line = reinterpret_cast<const char*>(factor.ahead);
    for (int row = 0; row < tile_rows; ++row)
        _mm_prefetch(line + row * factor.stride, _MM_HINT_T1);
}

// Adds left . right(0), .. to the sums; tiles have to be named when this is compiled.
template <int num_columns, class Right>
inline void multiply(const bf16* left, int64_t left_stride, const Right& right) {
    _tile_loadd(4, left, left_stride * sizeof(bf16));
#define INFLIGHT_ADD_PRODUCT(column)              \
    if (column < num_columns) {                   \
        const Factor factor = right(column);      \
        fetch(factor);                            \
        _tile_loadd(5, factor.at, factor.stride); \
        _tile_dpbf16ps(column, 4, 5);             \
    }
    INFLIGHT_ADD_PRODUCT(0)
    INFLIGHT_ADD_PRODUCT(1)
    INFLIGHT_ADD_PRODUCT(2)
    INFLIGHT_ADD_PRODUCT(3)
#undef INFLIGHT_ADD_PRODUCT
}

template <int num_columns>
inline void load_sums(const float* from, int64_t stride) {
    _tile_loadd(0, from, stride * sizeof(float));
    _tile_loadd(1, from + tile_columns, stride * sizeof(float));
    if (num_columns < 4) return;
    _tile_loadd(2, from + 2 * tile_columns, stride * sizeof(float));
    _tile_loadd(3, from + 3 * tile_columns, stride * sizeof(float));
}

template <int num_columns>
inline void store_sums(float* to, int64_t stride) {
    _tile_stored(0, to, stride * sizeof(float));
    _tile_stored(1, to + tile_columns, stride * sizeof(float));
    if (num_columns < 4) return;
    _tile_stored(2, to + 2 * tile_columns, stride * sizeof(float));
    _tile_stored(3, to + 3 * tile_columns, stride * sizeof(float));
}

struct TileProducts {
    using Query = bf16;
    using Storage = bf16;
    using Weight = bf16;

    static void begin(int rows) {
        const TileConfiguration configuration(rows < tile_rows ? rows : tile_rows);
        // GCC's intrinsic does not say that it reads all of it.
        __asm__ volatile("" : : "m"(configuration));
        _tile_loadconfig(&configuration);
    }

    static void end() { _tile_release(); }

    // A product into sums that nobody needs any more, or not yet.
    static void stay_awake() { _tile_dpbf16ps(0, 4, 5); }

    // The tile with all its groups, and zeros for the values of a group or half a group that is
    // not there.
    static Tile<bf16> readable(const KvShape& shape, const Tile<bf16>& tile, Scratch& scratch) {
        Tile<bf16> whole = tile;
        const int last = (tile.num_keys - 1) / tile_depth * 2;
        if (tile.num_keys % tile_depth)
            whole.values[last] =
                padded_values(shape, tile.values[last], tile.num_keys % tile_depth, scratch);
        repeat_first(tile.num_groups, whole);
        return whole;
    }

    // Of 32 keys, of which so many are there.
    static const bf16* padded_values(const KvShape& shape, const bf16* values, int num_present,
                                     Scratch& scratch) {
        const int64_t size = shape.head_dim, pairs = num_present / 2;
        memset(scratch.values, 0, tile_depth * size * sizeof(bf16));
        memcpy(scratch.values, values, pairs * size * 2 * sizeof(bf16));
        if (num_present % 2)
            for (int64_t i = pairs * size * 2; i < (pairs + 1) * size * 2; i += 2)
                scratch.values[i] = values[i];
        return scratch.values;
    }

    // Groups that are not there repeat the first: their scores are hidden, their weights 0.
    static void repeat_first(int num_groups, Tile<bf16>& tile) {
        for (int g = num_groups; g < Tile<bf16>::max_groups; ++g) {
            tile.keys[g] = tile.keys[0];
            tile.values[g] = tile.values[0];
        }
    }

    // Strips of fewer rows are read and written as whole ones; there is room for it.
    static void scores(const KvShape& shape, const bf16* query, int rows, const Tile<bf16>& tile,
                       float* scores) {
        if (tile.num_groups > Tile<bf16>::max_groups / 2)
            some_scores<4>(shape, query, rows, tile, scores);
        else
            some_scores<2>(shape, query, rows, tile, scores);
    }

    template <int num_groups>
    static void some_scores(const KvShape& shape, const bf16* query, int rows,
                            const Tile<bf16>& tile, float* scores) {
        const int64_t size = shape.head_dim;
        const Tile<bf16>* next = to_fetch(tile, rows);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < size; i += tile_depth)
            multiply<num_groups>(query + i, size, [&](int group) {
                const int64_t at = i * tile.key_stride;
                return Factor{tile.keys[group] + at, next ? next->keys[group] + at : nullptr,
                              tile.key_stride * 4};
            });
        store_sums<num_groups>(scores, key_tile);
    }

    static void accumulate(const KvShape& shape, const bf16* weights, int rows,
                           const Tile<bf16>& tile, float* sums) {
        int64_t dim = 0;
        for (; dim + 4 * tile_columns <= shape.head_dim; dim += 4 * tile_columns)
            some_sums<4>(shape, weights, rows, tile, dim, sums);
        if (dim < shape.head_dim) some_sums<2>(shape, weights, rows, tile, dim, sums);
    }

    template <int num_columns>
    static void some_sums(const KvShape& shape, const bf16* weights, int rows,
                          const Tile<bf16>& tile, int64_t dim, float* sums) {
        const int64_t size = shape.head_dim;
        const Tile<bf16>* next = to_fetch(tile, rows);
        load_sums<num_columns>(sums + dim, size);
        for (int group = 0; group < tile.num_groups; group += 2)
            multiply<num_columns>(weights + group * key_group, key_tile, [&](int column) {
                const int64_t at = (dim + column * tile_columns) * 2;
                return Factor{tile.values[group] + at, next ? next->values[group] + at : nullptr,
                              size * 4};
            });
        store_sums<num_columns>(sums + dim, size);
    }

    // Few rows wait for memory, and many for the arithmetic: only the few fetch ahead.
    static const Tile<bf16>* to_fetch(const Tile<bf16>& tile, int rows) {
        const Tile<bf16>* next = tile.next;
        return next && next->num_keys == key_tile && rows < tile_rows ? next : nullptr;
    }
};

// int8 storage, through a copy as bf16.
struct ExpandedTileProducts : TileProducts {
    using Storage = int8_t;

    static Tile<bf16> readable(const KvShape& shape, const Tile<int8_t>& tile, Scratch& scratch) {
        Tile<bf16> whole = expanded(shape, tile, scratch, stay_awake);
        if (tile.num_groups % 2) {  // weights of 0 meet what is left in the copy
            const int64_t group_elements = key_group * shape.head_dim;
            memset(scratch.values + tile.num_groups * group_elements, 0,
                   group_elements * sizeof(bf16));
        }
        repeat_first(tile.num_groups, whole);
        return whole;
    }
};

}  // namespace

void attend_bf16(const LayerCall& call, const WorkItem& item, const WorkItem* following,
                 Scratch& scratch) {
    attend_item<TileProducts>(call, item, following, scratch);
}

void attend_int8(const LayerCall& call, const WorkItem& item, const WorkItem* following,
                 Scratch& scratch) {
    attend_item<ExpandedTileProducts>(call, item, following, scratch);
}

}  // namespace amx
}  // namespace inflight
