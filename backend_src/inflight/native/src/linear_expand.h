// Groups of quantized panels as groups of bf16 panels, for the tiles of AMX.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace inflight {
namespace {

constexpr int vector_columns = 16;
constexpr int quad_bytes = 4 * panel_columns;  // four values, or two pairs, of all columns

__m512 load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// What a group's columns do to the whole numbers of their weights.
struct Scaling {
    __m512 scale, offset;
};

// The number of `bits` bits at `shift` of each lane, scaled. Set behind the exponent of 1 it is the
// float 1 + number / 2^bits, which saves a conversion; `scaling` is for that (see for_fractions).
template <int bits, int shift>
__m512 weights_at(__m512i bytes, const Scaling& scaling) {
    constexpr int place = 23 - bits;  // a float has 23 bits behind its exponent
    const __m512i mask = _mm512_set1_epi32(((1 << bits) - 1) << place);
    __m512i moved;
    if constexpr (shift < place)
        moved = _mm512_slli_epi32(bytes, place - shift);
    else
        moved = _mm512_srli_epi32(bytes, shift - place);
    constexpr int and_then_or = 0xea;
    const __m512i one = _mm512_set1_epi32(0x3f800000);
    const __m512i fraction = _mm512_ternarylogic_epi32(moved, mask, one, and_then_or);
    return _mm512_fmadd_ps((__m512)fraction, scaling.scale, scaling.offset);
}

// scale * number + offset = (scale * 2^bits) * (1 + number / 2^bits) + (offset - scale * 2^bits)
template <int bits>
Scaling for_fractions(__m512 scale, __m512 offset) {
    const __m512 larger = scale * _mm512_set1_ps(float(1 << bits));
    return {larger, offset - larger};
}

// Two values of 16 columns as [16][2] bf16, rounded half away from zero.
__m512i pair_up(__m512 even, __m512 odd) {
    const __m512i half_unit = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half_unit), 16);
    const __m512i high = _mm512_add_epi32((__m512i)odd, half_unit);
    constexpr int and_then_or = 0xea;
    return _mm512_ternarylogic_epi32(high, _mm512_set1_epi32(int(0xffff0000)), low, and_then_or);
}

// Four neighbours along k, at `shift`, `shift` + 8 and so on, as two pairs of their panel.
template <int bits, int shift>
void expand_quad(__m512i bytes, const Scaling& scaling, uint8_t* to) {
    const __m512i first = pair_up(weights_at<bits, shift>(bytes, scaling),
                                  weights_at<bits, shift + 8>(bytes, scaling));
    const __m512i second = pair_up(weights_at<bits, shift + 16>(bytes, scaling),
                                   weights_at<bits, shift + 24>(bytes, scaling));
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + quad_bytes, second);
}

// 16 columns of a group; `from` and `to` point at the first of them.
template <WeightKind kind>
void expand_columns(const uint8_t* from, const Scaling& scaling, uint8_t* to) {
    constexpr bool is_q8 = kind == WeightKind::q8_0;
    for (int quad = 0; quad < (is_q8 ? 8 : 4); ++quad) {
        const __m512i bytes = _mm512_loadu_si512(from + quad * quad_bytes);
        uint8_t* pairs = to + quad * 2 * quad_bytes;
        if constexpr (is_q8) {
            const __m512i sign = _mm512_set1_epi8(char(0x80));
            expand_quad<8, 0>(_mm512_xor_si512(bytes, sign), scaling, pairs);
        } else {
            expand_quad<4, 0>(bytes, scaling, pairs);
            expand_quad<4, 4>(bytes, scaling, pairs + 8 * quad_bytes);
        }
    }
}

template <WeightKind kind>
Scaling scaling_of(const uint8_t* halves) {
    const __m512 scale = load_halves(halves);
    if (kind == WeightKind::q8_0)  // taken + 128, to be unsigned
        return for_fractions<8>(scale, scale * _mm512_set1_ps(-128.0f));
    if (kind == WeightKind::q4_0) return for_fractions<4>(scale, scale * _mm512_set1_ps(-8.0f));
    return for_fractions<4>(scale, load_halves(halves + 2 * panel_columns));
}

// 32 values along k of the 32 columns of a panel.
template <WeightKind kind>
void expand_group(const uint8_t* group, uint8_t* target) {
    constexpr int64_t value_bytes = kind == WeightKind::q8_0 ? 1024 : 512;
    for (int column = 0; column < panel_columns; column += vector_columns) {
        const Scaling scaling = scaling_of<kind>(group + value_bytes + 2 * column);
        expand_columns<kind>(group + 4 * column, scaling, target + 4 * column);
    }
}

}  // namespace
}  // namespace inflight
