// The linear kernels of AVX2 with FMA and F16C.
#include <immintrin.h>

#include "linear.h"
#include "linear_finish.h"
#include "linear_float_slices.h"
#include "linear_quantized.h"
#include "linear_rows.h"

namespace inflight {
namespace {

struct Avx2 {
    using Floats = __m256;
    using Ints = __m256i;
    // 4 by 4 sums are all the registers; part of them waiting in memory costs less than to go
    // through the panel twice with half of its columns.
    static constexpr int lanes = 8, block_rows = 4, vectors = 4;
    static constexpr int q8_offset = 0;

    static Ints load_bytes(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static Ints load_q8(const uint8_t* from) { return load_bytes(from); }
    static Ints low_halves(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
    static Ints high_halves(Ints bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }
    static Ints splat(int32_t value) { return _mm256_set1_epi32(value); }
    static Floats splat_float(float value) { return _mm256_set1_ps(value); }

    // VPMADDUBSW takes one side unsigned, and saturates its sums of two products: weights of 0..255
    // could overflow it, their magnitudes of at most 128 cannot. The sign moves to x.
    static Ints dot_q8(Ints sums, Ints weights, int32_t x) {
        const Ints signed_x = _mm256_sign_epi8(splat(x), weights);
        return add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), signed_x));
    }
    static Ints add_pairs(Ints sums, Ints pairs) {
        return in_order(_mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }

    // Sums in 16 bits: the 16 products that each adds up in a group are at most 15 * 127 each.
    static Ints start_q4(int32_t) { return _mm256_setzero_si256(); }
    static Ints dot_q4(Ints sums, Ints weights, int32_t x) {
        return in_order(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, splat(x))));
    }
    static Ints whole_q4(Ints sums, int32_t start) {
        return _mm256_add_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), splat(start));
    }

    // GCC adds up whole numbers in an order of its own, all products of a group first, and they
    // do not fit the registers. What it cannot see into it leaves where it is.
    static Ints in_order(Ints sums) {
        asm("" : "+x"(sums));
        return sums;
    }
    static Floats to_float(Ints value) { return _mm256_cvtepi32_ps(value); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats load_halves(const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
};

template <WeightKind kind>
constexpr Route by_slices() {
    Route route = direct(Form::f32, product_by_slices<kind>);
    route.lead = slice_bytes;
    route.at_once = float_product_at_once<kind>;
    return route;
}

constexpr Route f32_route = by_slices<WeightKind::f32>();
constexpr Route bf16_route = by_slices<WeightKind::bf16>();

template <WeightKind kind, bool by_shares>
constexpr Route quantized_route() {
    Route route = direct(Form::int8, quantized_product<Avx2, kind, by_shares>, by_shares);
    route.at_once = quantized_product_at_once<Avx2, kind>;
    return route;
}

template <WeightKind kind, bool by_shares>
constexpr Route quantized = quantized_route<kind, by_shares>();

constexpr Route q8_0_route = quantized<WeightKind::q8_0, false>;
constexpr Route q4_0_route = quantized<WeightKind::q4_0, false>;
constexpr Route q4_1_route = quantized<WeightKind::q4_1, false>;
constexpr Route q8_0_shares = quantized<WeightKind::q8_0, true>;
constexpr Route q4_0_shares = quantized<WeightKind::q4_0, true>;
constexpr Route q4_1_shares = quantized<WeightKind::q4_1, true>;

constexpr int64_t shares_from = Avx2::block_rows + 1;  // fewer go through a panel once

}  // namespace

const LinearKernels linear_kernels_avx2 = {
    prepare_row,
    finish_tile,
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_route, q8_0_shares, q4_0_shares, q4_1_shares},
    {f32_route, bf16_route, q8_0_shares, q4_0_shares, q4_1_shares},
    {0, 0, shares_from, shares_from, shares_from},
    {0, 0, shares_from, shares_from, shares_from},
};

}  // namespace inflight
