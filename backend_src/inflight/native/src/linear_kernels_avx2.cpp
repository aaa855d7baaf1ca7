// The linear kernels of AVX2 with FMA and F16C.
#include <immintrin.h>

#include "linear.h"
#include "linear_finish.h"
#include "linear_float.h"
#include "linear_quantized.h"
#include "linear_rows.h"

namespace inflight {
namespace {

struct Avx2 {
    using Floats = __m256;
    using Ints = __m256i;
    static constexpr int lanes = 8, block_rows = 2;
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
    static Ints dot_q4(Ints sums, Ints weights, int32_t x) {
        return add_pairs(sums, _mm256_maddubs_epi16(weights, splat(x)));
    }
    static Ints add_pairs(Ints sums, Ints pairs) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Floats to_float(Ints value) { return _mm256_cvtepi32_ps(value); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats load_halves(const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
};

constexpr Route f32_route = direct(Form::f32, float_product<WeightKind::f32>);
constexpr Route bf16_route = direct(Form::f32, float_product<WeightKind::bf16>);
constexpr Route q8_0_route = direct(Form::int8, quantized_product<Avx2, WeightKind::q8_0>);
constexpr Route q4_0_route = direct(Form::int8, quantized_product<Avx2, WeightKind::q4_0>);
constexpr Route q4_1_route = direct(Form::int8, quantized_product<Avx2, WeightKind::q4_1>);

}  // namespace

const LinearKernels linear_kernels_avx2 = {
    prepare_row,
    finish_tile,
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0},
};

}  // namespace inflight
