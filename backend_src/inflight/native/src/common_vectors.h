// Sixteen floats at a time, in the compiler's own vector types: one source that becomes zmm, ymm or
// xmm code by the flags of the file that includes it.
//
// `wide_float` is what one register holds. Where that is less than sixteen floats, `f32x16` is a
// structure of several of them: compilers keep a vector type that is wider than a register in
// memory, and compare it float by float.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>  // for the few steps that compilers do not find by themselves
#endif

#define INFLIGHT_INLINE __attribute__((always_inline)) static inline

namespace inflight {

using bf16 = uint16_t;  // the upper half of a float

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));

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

INFLIGHT_INLINE wide_float wide_splat(float value) { return value - wide_float{}; }

// The larger of each two lanes; where one is NaN, that of b.
INFLIGHT_INLINE wide_float wide_max(wide_float a, wide_float b) {
#if defined(__AVX512F__)
    return (wide_float)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (wide_float)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INFLIGHT_INLINE wide_float wide_min(wide_float a, wide_float b) {
#if defined(__AVX512F__)
    return (wide_float)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (wide_float)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// Rounds to the upper half of a float, to nearest even; NaN stays NaN.
INFLIGHT_INLINE wide_bits upper_half(wide_float value) {
    const wide_bits bits = (wide_bits)value;
    const wide_bits rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
    const wide_int is_number = value == value;
    return (is_number ? rounded : quiet) >> 16;
}

INFLIGHT_INLINE wide_half wide_to_bf16(wide_float value) {
#if defined(__AVX512BF16__)
    return (wide_half)_mm512_cvtneps_pbh((__m512)value);
#else
    return __builtin_convertvector(upper_half(value), wide_half);
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

INFLIGHT_INLINE wide_float wide_exp(wide_float x) {
    return wide_exp2(wide_min(wide_splat(127.0f), x * log2_e));
}

// 1 / x for 1 <= x <= 2^127; NaN stays NaN. Relative error 1e-7.
INFLIGHT_INLINE wide_float wide_reciprocal(wide_float x) {
#if defined(__AVX512F__)
    // One of Newton's steps doubles the 14 bits of the estimate; a division takes four times as long.
    const wide_float estimate = (wide_float)_mm512_rcp14_ps((__m512)x);
    return estimate * (2.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

INFLIGHT_INLINE float exp2(float x) { return wide_exp2(wide_splat(x))[0]; }

#if defined(__AVX512F__)
typedef wide_float f32x16;
#else
struct f32x16 {
    wide_float parts[lanes / wide_lanes];
};
#endif

// Of each part part(i), i being its first lane.
template <class Part>
INFLIGHT_INLINE f32x16 of_parts(const Part& part) {
#if defined(__AVX512F__)
    return part(0);
#elif defined(__AVX__)
    return {part(0), part(8)};
#else
    return {part(0), part(4), part(8), part(12)};
#endif
}

INFLIGHT_INLINE wide_float part_of(const f32x16& value, int first) {
#if defined(__AVX512F__)
    return value;
#else
    return value.parts[first / wide_lanes];
#endif
}

template <class Function>
INFLIGHT_INLINE void for_parts(const f32x16& value, const Function& f) {
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += wide_lanes) f(i, part_of(value, i));
}

// f of each register's part of a and b.
template <class Function>
INFLIGHT_INLINE f32x16 by_parts(f32x16 a, f32x16 b, const Function& f) {
    return of_parts([&](int i) { return f(part_of(a, i), part_of(b, i)); });
}

INFLIGHT_INLINE f32x16 splat(float value) {
    return of_parts([&](int) { return wide_splat(value); });
}

#if !defined(__AVX512F__)
#define INFLIGHT_BY_PARTS(op)                                                                    \
    INFLIGHT_INLINE f32x16 operator op(f32x16 a, f32x16 b) {                                     \
        return by_parts(a, b, [](wide_float x, wide_float y) { return x op y; });                \
    }                                                                                            \
    INFLIGHT_INLINE f32x16 operator op(f32x16 a, float b) { return a op splat(b); }              \
    INFLIGHT_INLINE f32x16 operator op(float a, f32x16 b) { return splat(a) op b; }              \
    INFLIGHT_INLINE f32x16& operator op##=(f32x16& a, f32x16 b) { return a = a op b; }
INFLIGHT_BY_PARTS(+)
INFLIGHT_BY_PARTS(-)
INFLIGHT_BY_PARTS(*)
INFLIGHT_BY_PARTS(/)
#undef INFLIGHT_BY_PARTS

INFLIGHT_INLINE f32x16 operator-(f32x16 a) {
    return of_parts([&](int i) { return -part_of(a, i); });
}
#endif

INFLIGHT_INLINE f32x16 max(f32x16 a, f32x16 b) { return by_parts(a, b, wide_max); }

INFLIGHT_INLINE f32x16 min(f32x16 a, f32x16 b) { return by_parts(a, b, wide_min); }

INFLIGHT_INLINE f32x16 exp(f32x16 x) {
    return of_parts([&](int i) { return wide_exp(part_of(x, i)); });
}

INFLIGHT_INLINE f32x16 reciprocal(f32x16 x) {
    return of_parts([&](int i) { return wide_reciprocal(part_of(x, i)); });
}

// Goes to 1 and -1 by itself. Absolute error 2e-7.
INFLIGHT_INLINE f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (1.0f + exp(x + x)); }

INFLIGHT_INLINE f32x16 load(const float* from) {
    return of_parts([&](int i) { return read<wide_float>(from + i); });
}

INFLIGHT_INLINE f32x16 load(const bf16* from) {
    return of_parts([&](int i) { return (wide_float)(widened(read<wide_half>(from + i)) << 16); });
}

INFLIGHT_INLINE void store(float* to, f32x16 value) {
    for_parts(value, [&](int i, wide_float part) { write(to + i, part); });
}

INFLIGHT_INLINE void store(bf16* to, f32x16 value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i first = (__m256i)upper_half(value.parts[0]);
    const __m256i second = (__m256i)upper_half(value.parts[1]);
    // Packed within the halves of a register each.
    write(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8));
#else
    for_parts(value, [&](int i, wide_float part) { write(to + i, wide_to_bf16(part)); });
#endif
}

INFLIGHT_INLINE float sum(f32x4 value) { return (value[0] + value[2]) + (value[1] + value[3]); }

INFLIGHT_INLINE float sum(f32x8 value) {
    return sum(read<f32x4>(&value) + read<f32x4>((const float*)&value + 4));
}

INFLIGHT_INLINE float sum(f32x16 value) {
#if defined(__AVX512F__)
    return sum(read<f32x8>(&value) + read<f32x8>((const float*)&value + 8));
#elif defined(__AVX__)
    return sum(value.parts[0] + value.parts[1]);
#else
    return sum((value.parts[0] + value.parts[2]) + (value.parts[1] + value.parts[3]));
#endif
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
#if defined(__AVX512F__)
    const f32x8 a = read<f32x8>(&value), b = read<f32x8>((const float*)&value + 8);
    return largest(a > b ? a : b);
#elif defined(__AVX__)
    return largest(wide_max(value.parts[0], value.parts[1]));
#else
    return largest(wide_max(wide_max(value.parts[0], value.parts[1]),
                            wide_max(value.parts[2], value.parts[3])));
#endif
}

}  // namespace inflight
