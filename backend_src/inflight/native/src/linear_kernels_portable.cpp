// The linear kernels for any machine.
#include "linear.h"
#include "linear_finish.h"
#include "linear_float.h"
#include "linear_quantized.h"
#include "linear_rows.h"

namespace inflight {
namespace {

float to_float_from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    float value;
    if (magnitude >= 0x7c00) {  // infinity and NaN
        const uint32_t bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    // Shifted into place the exponent is 112 too small, also for subnormal numbers.
    const uint32_t bits = sign | magnitude << 13;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f;
}

struct Portable {
    using Floats = native_float;
    typedef int32_t Ints __attribute__((vector_size(4 * native_lanes)));
    typedef uint32_t Bits __attribute__((vector_size(4 * native_lanes)));
    static constexpr int lanes = native_lanes, block_rows = 2, vectors = 2;
    static constexpr int q8_offset = 0;

    static Ints load_bytes(const uint8_t* from) { return read<Ints>(from); }
    static Ints load_q8(const uint8_t* from) { return load_bytes(from); }
    static Ints low_halves(Ints bytes) { return bytes & 0x0f0f0f0f; }
    static Ints high_halves(Ints bytes) { return bytes >> 4 & 0x0f0f0f0f; }
    static Ints splat(int32_t value) { return value - Ints{}; }
    static Floats splat_float(float value) { return value - Floats{}; }

    // The byte is moved up to the sign and down again.
    template <int byte>
    static Ints product(Ints weights, int32_t x) {
        const Ints upper = (Ints)((Bits)weights << (24 - 8 * byte));
        return (upper >> 24) * int32_t(int8_t(x >> (8 * byte)));
    }
    static Ints dot_q8(Ints sums, Ints weights, int32_t x) {
        return sums + product<0>(weights, x) + product<1>(weights, x) + product<2>(weights, x) +
               product<3>(weights, x);
    }
    static Ints dot_q4(Ints sums, Ints weights, int32_t x) { return dot_q8(sums, weights, x); }
    static Ints start_q4(int32_t start) { return splat(start); }
    static Ints whole_q4(Ints sums, int32_t) { return sums; }
    static Floats to_float(Ints value) { return __builtin_convertvector(value, Floats); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
    static Floats load_halves(const uint8_t* from) {
        Floats value;
        for (int i = 0; i < lanes; ++i) {
            uint16_t half;
            memcpy(&half, from + 2 * i, sizeof half);
            value[i] = to_float_from_half(half);
        }
        return value;
    }
};

constexpr Route f32_route = direct(Form::f32, float_product<WeightKind::f32>);
constexpr Route bf16_route = direct(Form::f32, float_product<WeightKind::bf16>);
constexpr Route q8_0_route = direct(Form::int8, quantized_product<Portable, WeightKind::q8_0>);
constexpr Route q4_0_route = direct(Form::int8, quantized_product<Portable, WeightKind::q4_0>);
constexpr Route q4_1_route = direct(Form::int8, quantized_product<Portable, WeightKind::q4_1>);

}  // namespace

const LinearKernels linear_kernels_portable = {
    prepare_row,
    finish_tile,
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {f32_route, bf16_route, q8_0_route, q4_0_route, q4_1_route},
    {0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0},
};

}  // namespace inflight
