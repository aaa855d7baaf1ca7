// Quantized panels as bf16 panels, for the tiles of AMX: the same weights, rounded to bf16.
#include <immintrin.h>

#include "linear.h"

namespace inflight {
namespace {

constexpr int half = 16;  // columns of a vector

__m512 load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Two values of 16 columns as [16][2] bf16.
__m512i pair_up(__m512 even, __m512 odd) {
    const __m512i one_then_other = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(order, one_then_other);
}

// The values of bits [shift, shift + 4) of each lane.
template <int shift>
__m512 half_byte(__m512i bytes) {
    const __m512i value = _mm512_and_si512(_mm512_srli_epi32(bytes, shift), _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(value);
}

// The signed byte at bit `shift` of each lane.
template <int shift>
__m512 signed_byte(__m512i bytes) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - shift), 24));
}

void store_quad(uint8_t* to, int quad, __m512i first_pair, __m512i second_pair) {
    uint8_t* pairs = to + 2 * quad * 4 * panel_columns;
    _mm512_storeu_si512(pairs, first_pair);
    _mm512_storeu_si512(pairs + 4 * panel_columns, second_pair);
}

// 16 columns of a group; `from` and `to` point at the first of them.
void expand_q8_0(const uint8_t* from, const uint8_t* scales, uint8_t* to) {
    const __m512 scale = load_halves(scales);
    for (int quad = 0; quad < 8; ++quad) {
        const __m512i stored = _mm512_loadu_si512(from + quad * 4 * panel_columns);
        const __m512i bytes = _mm512_xor_si512(stored, _mm512_set1_epi8(char(0x80)));  // - 128
        store_quad(to, quad,
                   pair_up(signed_byte<0>(bytes) * scale, signed_byte<8>(bytes) * scale),
                   pair_up(signed_byte<16>(bytes) * scale, signed_byte<24>(bytes) * scale));
    }
}

template <int shift>
void expand_halves(__m512i bytes, __m512 scale, __m512 minimum, int quad, uint8_t* to) {
    const auto value = [&](__m512 whole) { return _mm512_fmadd_ps(whole, scale, minimum); };
    store_quad(
        to, quad,
        pair_up(value(half_byte<shift>(bytes)), value(half_byte<shift + 8>(bytes))),
        pair_up(value(half_byte<shift + 16>(bytes)), value(half_byte<shift + 24>(bytes))));
}

void expand_q4(const uint8_t* from, __m512 scale, __m512 minimum, uint8_t* to) {
    for (int quad = 0; quad < 4; ++quad) {
        const __m512i bytes = _mm512_loadu_si512(from + quad * 4 * panel_columns);
        expand_halves<0>(bytes, scale, minimum, quad, to);
        expand_halves<4>(bytes, scale, minimum, quad + 4, to);
    }
}

// Calls expand(values, scales, target) for 16 columns of a group after 16 others.
template <WeightKind kind, class ExpandColumns>
void for_each_group(const uint8_t* panel, int64_t k, uint8_t* target, const ExpandColumns& expand) {
    constexpr int64_t value_bytes = kind == WeightKind::q8_0 ? 1024 : 512;
    for (int64_t g = 0; g < k / group_size; ++g) {
        for (int column = 0; column < panel_columns; column += half)
            expand(panel + 4 * column, panel + value_bytes + 2 * column, target + 4 * column);
        panel += group_bytes(kind);
        target += group_bytes(WeightKind::bf16);
    }
}

}  // namespace

void expand_q8_0_avx512(const uint8_t* panel, int64_t k, uint8_t* bf16_panel) {
    for_each_group<WeightKind::q8_0>(panel, k, bf16_panel, expand_q8_0);
}

void expand_q4_0_avx512(const uint8_t* panel, int64_t k, uint8_t* bf16_panel) {
    for_each_group<WeightKind::q4_0>(
        panel, k, bf16_panel, [](const uint8_t* from, const uint8_t* scales, uint8_t* to) {
            const __m512 scale = load_halves(scales);
            expand_q4(from, scale, scale * _mm512_set1_ps(-8.0f), to);
        });
}

void expand_q4_1_avx512(const uint8_t* panel, int64_t k, uint8_t* bf16_panel) {
    for_each_group<WeightKind::q4_1>(
        panel, k, bf16_panel, [](const uint8_t* from, const uint8_t* scales, uint8_t* to) {
            expand_q4(from, load_halves(scales), load_halves(scales + 2 * panel_columns), to);
        });
}

}  // namespace inflight
