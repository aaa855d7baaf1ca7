// A tile of int8 keys and values as bf16 pairs in scratch memory. Whole numbers up to 127 are exact
// in bf16: what the scales stand for stays outside the products.
#pragma once

#include <immintrin.h>

#include "attention_flash.h"

namespace inflight {
namespace {

// 16 pairs, the lower halves from `first` and the upper from `second`.
INFLIGHT_INLINE void expand_pairs(const int8_t* first, const int8_t* second, bf16* to) {
    const auto as_float = [](const int8_t* from) {
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from))));
    };
    const __m512i low = _mm512_srli_epi32(as_float(first), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(low, as_float(second)));
}

// K [head_dim / 2][key_tile][2], V [key_tile / 2][head_dim][2]. Calls meanwhile() after each group.
template <class Meanwhile>
Tile<bf16> expanded(const KvShape& shape, const Tile<int8_t>& tile, Scratch& scratch,
                    const Meanwhile& meanwhile) {
    const int64_t size = shape.head_dim;
    Tile<bf16> result;
    result.key_stride = key_tile;
    result.first_key = tile.first_key;
    result.num_groups = tile.num_groups;
    result.num_keys = tile.num_keys;
    result.next = nullptr;
    for (int g = 0; g < tile.num_groups; ++g) {
        const bool fetch = tile.next && g < tile.next->num_groups;
        bf16* keys = scratch.keys + g * key_group * 2;
        for (int64_t i = 0; i < size; i += 2) {
            const int64_t at = i * tile.key_stride;
            if (fetch) _mm_prefetch(tile.next->keys[g] + at, _MM_HINT_T1);
            expand_pairs(tile.keys[g] + at, tile.keys[g] + at + tile.key_stride,
                         keys + i * key_tile);
        }
        bf16* values = scratch.values + g * key_group * size;
        for (int64_t at = 0; at < key_group * size; at += 2 * size) {
            if (fetch)
                for (int64_t line = 0; line < 2 * size; line += 64)
                    _mm_prefetch(tile.next->values[g] + at + line, _MM_HINT_T1);
            for (int64_t i = 0; i < size; i += lanes)
                expand_pairs(tile.values[g] + at + i, tile.values[g] + at + size + i,
                             values + at + i * 2);
        }
        result.keys[g] = keys;
        result.values[g] = values;
        meanwhile();
    }
    return result;
}

}  // namespace
}  // namespace inflight
