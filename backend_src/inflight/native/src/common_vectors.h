// Sixteen floats at a time, in the compiler's own vector types: one source that becomes zmm, ymm or
// xmm code by the flags of the file that includes it.
//
// Where a register holds fewer than sixteen, compilers do sums and products of the whole part by
// part, but comparisons float by float, and long chains of steps through memory. What compares or
// takes many steps is therefore written for `wide_float`, a vector of one register, and loops that
// matter are too.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>  // for the few steps that compilers do not find by themselves
#endif

#define INFLIGHT_INLINE __attribute__((always_inline)) static inline

namespace inflight {

using bf16 = uint16_t;  // the upper half of a float

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

constexpr int lanes = 16;

#if defined(__AVX512F__)
constexpr int wide_lanes = 16;
#elif defined(__AVX__)
constexpr int wide_lanes = 8;
#else
constexpr int wide_lanes = 4;
#endif
typedef float wide_float __attribute__((vector_size(4 * wide_lanes)));
typedef int32_t wide_int __attribute__((vector_size(4 * wide_lanes)));
typedef uint32_t wide_bits __attribute__((vector_size(4 * wide_lanes)));
typedef uint16_t wide_half __attribute__((vector_size(2 * wide_lanes)));

constexpr float log2_e = 1.44269504f;

template <class Vector>
INFLIGHT_INLINE Vector read(const void* from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class Vector>
INFLIGHT_INLINE void write(void* to, Vector value) {
    memcpy(to, &value, sizeof value);
}

INFLIGHT_INLINE f32x16 splat(float value) { return value - f32x16{}; }

INFLIGHT_INLINE wide_float wide_splat(float value) { return value - wide_float{}; }

// The larger of each two lanes; where one is NaN, that of b.
INFLIGHT_INLINE wide_float wide_max(wide_float a, wide_float b) {
#if defined(__AVX512F__)
    return (wide_float)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

INFLIGHT_INLINE wide_float wide_min(wide_float a, wide_float b) {
#if defined(__AVX512F__)
    return (wide_float)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// Rounds to nearest even; NaN stays NaN.
INFLIGHT_INLINE wide_half wide_to_bf16(wide_float value) {
#if defined(__AVX512BF16__)
    return (wide_half)_mm512_cvtneps_pbh((__m512)value);
#else
    const wide_bits bits = (wide_bits)value;
    const wide_bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const wide_bits quiet = (bits >> 16) | 0x40;
    const wide_int is_number = value == value;
    return __builtin_convertvector(is_number ? rounded : quiet, wide_half);
#endif
}

INFLIGHT_INLINE wide_bits widened(wide_half half) {
#if defined(__AVX512F__)
    return (wide_bits)_mm512_cvtepu16_epi32((__m256i)half);
#else
    return __builtin_convertvector(half, wide_bits);
#endif
}

// 2^x for x <= 127; 0 below -126.5; NaN stays NaN. Relative error 1e-7.
//
// 2^x = 2^n * 2^f with n whole and |f| <= 1/2, and the polynomial for 2^f whose largest relative
// error is least for its degree.
INFLIGHT_INLINE wide_float wide_exp2(wide_float x) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const wide_float bounded = wide_max(wide_splat(-127.0f), x);
    const wide_float shifted = bounded + to_whole;
    const wide_float f = bounded - (shifted - to_whole);
    wide_float p = 1.327647129e-3f * f + 9.675540961e-3f;
    p = p * f + 5.550713092e-2f;
    p = p * f + 2.402212024e-1f;
    p = p * f + 6.931469440e-1f;
    p = p * f + 1.000000119f;
    // The lowest bits of `shifted` are n; n = -127 makes the factor 0.
    return p * (wide_float)(((wide_int)shifted + 127) << 23);
}

INFLIGHT_INLINE float exp2(float x) { return wide_exp2(wide_splat(x))[0]; }

// f of each register's part of a and b.
template <class Function>
INFLIGHT_INLINE f32x16 by_parts(f32x16 a, f32x16 b, const Function& f) {
    f32x16 result;
    for (int i = 0; i < lanes; i += wide_lanes)
        write((float*)&result + i, f(read<wide_float>((const float*)&a + i),
                                     read<wide_float>((const float*)&b + i)));
    return result;
}

INFLIGHT_INLINE f32x16 max(f32x16 a, f32x16 b) { return by_parts(a, b, wide_max); }

INFLIGHT_INLINE f32x16 min(f32x16 a, f32x16 b) { return by_parts(a, b, wide_min); }

INFLIGHT_INLINE f32x16 exp(f32x16 x) {
    return by_parts(x, x, [](wide_float part, wide_float) {
        return wide_exp2(wide_min(wide_splat(127.0f), part * log2_e));
    });
}

// 1 / x for 1 <= x <= 2^127; NaN stays NaN. Relative error 1e-7.
INFLIGHT_INLINE f32x16 reciprocal(f32x16 x) {
#if defined(__AVX512F__)
    // One of Newton's steps doubles the 14 bits of the estimate; a division takes four times as long.
    const f32x16 estimate = (f32x16)_mm512_rcp14_ps((__m512)x);
    return estimate * (2.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

// Goes to 1 and -1 by itself. Absolute error 2e-7.
INFLIGHT_INLINE f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (1.0f + exp(x + x)); }

INFLIGHT_INLINE f32x16 load(const float* from) { return read<f32x16>(from); }

INFLIGHT_INLINE f32x16 load(const bf16* from) {
    f32x16 result;
    for (int i = 0; i < lanes; i += wide_lanes)
        write((float*)&result + i, widened(read<wide_half>(from + i)) << 16);
    return result;
}

INFLIGHT_INLINE void store(float* to, f32x16 value) { write(to, value); }

INFLIGHT_INLINE void store(bf16* to, f32x16 value) {
    for (int i = 0; i < lanes; i += wide_lanes)
        write(to + i, wide_to_bf16(read<wide_float>((const float*)&value + i)));
}

INFLIGHT_INLINE float sum(f32x4 value) { return (value[0] + value[2]) + (value[1] + value[3]); }

INFLIGHT_INLINE float sum(f32x8 value) {
    return sum(read<f32x4>(&value) + read<f32x4>((const float*)&value + 4));
}

INFLIGHT_INLINE float sum(f32x16 value) {
    return sum(read<f32x8>(&value) + read<f32x8>((const float*)&value + 8));
}

INFLIGHT_INLINE float largest(f32x4 value) {
    const float left = value[0] > value[2] ? value[0] : value[2];
    const float right = value[1] > value[3] ? value[1] : value[3];
    return left > right ? left : right;
}

INFLIGHT_INLINE float largest(f32x8 value) {
    const f32x4 a = read<f32x4>(&value), b = read<f32x4>((const float*)&value + 4);
    return largest(a > b ? a : b);
}

INFLIGHT_INLINE float largest(f32x16 value) {
    if (wide_lanes == 4) {
        const float left = largest(read<f32x8>(&value));
        const float right = largest(read<f32x8>((const float*)&value + 8));
        return left > right ? left : right;
    }
    const f32x8 a = read<f32x8>(&value), b = read<f32x8>((const float*)&value + 8);
    return largest(a > b ? a : b);
}

}  // namespace inflight
