// The linear kernels of AVX-512 with VNNI and BF16.
#include <immintrin.h>

#include "linear.h"
#include "linear_finish.h"
#include "linear_float.h"
#include "linear_quantized.h"
#include "linear_rows.h"

namespace inflight {
namespace {

struct Avx512 {
    using Floats = __m512;
    using Ints = __m512i;
    static constexpr int lanes = 16, block_rows = 6, vectors = 2;
    static constexpr int q8_offset = 128;  // VPDPBUSD takes one side unsigned: the weights

    static Ints load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
    static Ints load_q8(const uint8_t* from) {
        return _mm512_xor_si512(load_bytes(from), _mm512_set1_epi8(char(0x80)));
    }
    static Ints low_halves(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
    static Ints high_halves(Ints bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
    static Ints splat(int32_t value) { return _mm512_set1_epi32(value); }
    static Floats splat_float(float value) { return _mm512_set1_ps(value); }
    static Ints dot_q8(Ints sums, Ints weights, int32_t x) {
        return _mm512_dpbusd_epi32(sums, weights, splat(x));
    }
    static Ints dot_q4(Ints sums, Ints weights, int32_t x) { return dot_q8(sums, weights, x); }
    static Ints start_q4(int32_t start) { return splat(start); }
    static Ints whole_q4(Ints sums, int32_t) { return sums; }
    static Floats to_float(Ints value) { return _mm512_cvtepi32_ps(value); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats load_halves(const uint8_t* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
};

constexpr Route f32_route = direct(Form::f32, float_product<WeightKind::f32>);
constexpr Route bf16_route = direct(Form::bf16, bf16_product_avx512);
constexpr Route q8_0_route = direct(Form::int8, quantized_product<Avx512, WeightKind::q8_0>);
constexpr Route q4_0_route = direct(Form::int8, quantized_product<Avx512, WeightKind::q4_0>);
constexpr Route q4_1_route = direct(Form::int8, quantized_product<Avx512, WeightKind::q4_1>);

// A single row's, without AMX. (With it nobody has measured it; int8 and int4 lose by it.)
constexpr Route bf16_once_route() {
    Route route = bf16_route;
    route.at_once = bf16_product_at_once_avx512;
    return route;
}

constexpr Route bf16_at_once = bf16_once_route();
constexpr Route bf16_shares = direct(Form::bf16, bf16_product_by_shares_avx512, true);

template <WeightKind kind>
constexpr Route quantized_shares = direct(Form::int8, quantized_product<Avx512, kind, true>, true);

// From a second block of rows on: fewer go through a panel once. With more rows of bf16 than one
// call takes the driver spreads what is fetched over its calls, which is even enough.
constexpr int64_t quantized_shares_from = Avx512::block_rows + 1;
constexpr int64_t bf16_shares_from = bf16_block_rows_avx512 + 1;
constexpr int64_t bf16_shares_to = most_block_rows + 1;

constexpr Route q8_0_shares = quantized_shares<WeightKind::q8_0>;
constexpr Route q4_0_shares = quantized_shares<WeightKind::q4_0>;
constexpr Route q4_1_shares = quantized_shares<WeightKind::q4_1>;

}  // namespace

const LinearKernels linear_kernels_avx512 = {
    prepare_row,
    finish_tile,
    {f32_route, bf16_at_once, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_shares, q8_0_shares, q4_0_shares, q4_1_shares},
    {f32_route, bf16_route, q8_0_shares, q4_0_shares, q4_1_shares},
    {0, bf16_shares_from, quantized_shares_from, quantized_shares_from, quantized_shares_from},
    {0, bf16_shares_to, quantized_shares_from, quantized_shares_from, quantized_shares_from},
};

// Only where their tiles are linked in, too: a CPU without AMX compiles nothing for it.
#ifdef INFLIGHT_HAVE_AMX
namespace {

// AMX for more rows. Sums of int8 tiles reach no further than a group of 32, and each has to come
// out of its tile to be scaled, for every 16 rows anew; to expand the weights to bf16 costs more at
// first and half as much for each row. From which number of rows on either wins:
// tests/benchmarks/native_linear_speed.py.
constexpr Route bf16_tiles(Product product, bool expands) {
    return {Form::bf16, product, 32, 16, expands, begin_bf16_tiles_amx, end_tiles_amx};
}

constexpr Route q8_0_int8_tiles = {
    Form::int8, q8_0_int8_product_amx, 16, 16, false, begin_int8_tiles_amx, end_tiles_amx};

constexpr int64_t bf16_tiles_from = 1, q8_int8_tiles_from = 7;
constexpr int64_t q8_expanded_from = 32, q4_expanded_from = 11;

}  // namespace

const LinearKernels linear_kernels_amx = {
    prepare_row,
    finish_tile,
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_tiles(bf16_product_amx, false), q8_0_int8_tiles,
     bf16_tiles(q4_0_product_amx, true), bf16_tiles(q4_1_product_amx, true)},
    {f32_route, bf16_tiles(bf16_product_amx, false), bf16_tiles(q8_0_product_amx, true),
     bf16_tiles(q4_0_product_amx, true), bf16_tiles(q4_1_product_amx, true)},
    {0, bf16_tiles_from, q8_int8_tiles_from, q4_expanded_from, q4_expanded_from},
    {0, bf16_tiles_from, q8_expanded_from, q4_expanded_from, q4_expanded_from},
};
#endif

}  // namespace inflight
