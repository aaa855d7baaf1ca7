// Sixteen floats at a time, in the compiler's own vector types: one source that becomes zmm, ymm or
// xmm code by the flags of the file that includes it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>  // for the few steps that compilers do not find by themselves
#endif

namespace inflight {

using bf16 = uint16_t;  // the upper half of a float

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int lanes = 16;
constexpr float log2_e = 1.44269504f;

template <class Vector>
static inline Vector read(const void* from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline f32x16 splat(float value) { return value - f32x16{}; }

static inline f32x16 load(const float* from) { return read<f32x16>(from); }

static inline f32x16 load(const bf16* from) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(from)), 16);
#else
    return (f32x16)(__builtin_convertvector(read<u16x16>(from), u32x16) << 16);
#endif
}

static inline void store(float* to, f32x16 value) { memcpy(to, &value, sizeof value); }

// Rounds to nearest even; NaN stays NaN.
static inline u16x16 to_bf16(f32x16 value) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    const u32x16 bits = (u32x16)value;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32x16 quiet = (bits >> 16) | 0x40;
    const i32x16 is_number = value == value;
    return __builtin_convertvector(is_number ? rounded : quiet, u16x16);
#endif
}

static inline void store(bf16* to, f32x16 value) {
    const u16x16 half = to_bf16(value);
    memcpy(to, &half, sizeof half);
}

static inline void store_two(float* to, f32x16 a, f32x16 b) {
    store(to, a);
    store(to + lanes, b);
}

static inline void store_two(bf16* to, f32x16 a, f32x16 b) {
#if defined(__AVX512BF16__)
    // In one piece: who loads 64 bytes soon after would wait for two stores.
    const auto both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    memcpy(to, &both, sizeof both);
#else
    store(to, a);
    store(to + lanes, b);
#endif
}

// The larger of each two lanes; where one is NaN, that of b.
static inline f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

static inline float sum(f32x16 value) {
    const f32x8 eight = read<f32x8>(&value) + read<f32x8>((const float*)&value + 8);
    const f32x4 four = read<f32x4>(&eight) + read<f32x4>((const float*)&eight + 4);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline float largest(f32x16 value) {
    const f32x8 a = read<f32x8>(&value), b = read<f32x8>((const float*)&value + 8);
    const f32x8 eight = a > b ? a : b;
    const f32x4 c = read<f32x4>(&eight), d = read<f32x4>((const float*)&eight + 4);
    const f32x4 four = c > d ? c : d;
    const float left = four[0] > four[2] ? four[0] : four[2];
    const float right = four[1] > four[3] ? four[1] : four[3];
    return left > right ? left : right;
}

// 2^x for x <= 127; 0 below -126.5; NaN stays NaN. Relative error 1e-7, or 8e-5 where the result is
// rounded to bf16.
//
// 2^x = 2^n * 2^f with n whole and |f| <= 1/2, and the polynomial for 2^f whose largest relative
// error is least for its degree.
enum class Precision { full, for_bf16 };

template <Precision precision = Precision::full>
static inline f32x16 exp2(f32x16 x) {
    const f32x16 to_whole = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const f32x16 bounded = max(splat(-127.0f), x);
    const f32x16 shifted = bounded + to_whole;
    const f32x16 f = bounded - (shifted - to_whole);
    f32x16 p;
    if (precision == Precision::full) {
        p = splat(1.327647129e-3f) * f + splat(9.675540961e-3f);
        p = p * f + splat(5.550713092e-2f);
        p = p * f + splat(2.402212024e-1f);
        p = p * f + splat(6.931469440e-1f);
        p = p * f + splat(1.000000119f);
    } else {
        p = splat(5.517166853e-2f) * f + splat(2.426111251e-1f);
        p = p * f + splat(6.932609677e-1f);
        p = p * f + splat(9.999280572e-1f);
    }
    // The lowest bits of `shifted` are n; n = -127 makes the factor 0.
    return p * (f32x16)(((i32x16)shifted + 127) << 23);
}

static inline f32x16 exp(f32x16 x) { return exp2(min(splat(127.0f), x * log2_e)); }

// Goes to 1 and -1 by itself. Absolute error 2e-7.
static inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (1.0f + exp(x + x)); }

}  // namespace inflight
