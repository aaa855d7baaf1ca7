// Rows of x in the form that a kernel asks for. Compiled anew for each instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common_vectors.h"
#include "linear.h"
#include "linear_partial.h"

namespace inflight {
namespace {

template <class Target, class Source>
void convert_row(const Source* x, int64_t k, int64_t padded, Target* values) {
    for (int64_t i = 0; i < padded; i += wide_lanes)
        store_part(values + i, load_up_to(x + i, k - i));
}

typedef int32_t i32x4 __attribute__((vector_size(16)));

constexpr int group_parts = group_size / wide_lanes;

// `combine` of all lanes of a register.
template <class Combine>
int32_t folded(wide_int value, const Combine& combine) {
    i32x4 four = read<i32x4>(&value);
    for (int i = 4; i < wide_lanes; i += 4)
        four = combine(four, read<i32x4>((const int32_t*)&value + i));
    four = combine(four, i32x4{four[2], four[3], four[0], four[1]});
    four = combine(four, i32x4{four[1], four[0], four[3], four[2]});
    return four[0];
}

// As bit patterns magnitudes are in the order of their values, with NaN above all.
float largest_magnitude(const wide_float (&parts)[group_parts]) {
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    wide_int largest{};
    for (int i = 0; i < group_parts; ++i)
        largest = larger(largest, (wide_int)parts[i] & 0x7fffffff);
    const int32_t bits = folded(largest, larger);
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Nearest even, of magnitudes below 2^22: added to 1.5 * 2^23 it is a whole number in the mantissa.
wide_int round_to_int(wide_float value) {
    return (wide_int)(value + 12582912.0f) - 0x4b400000;
}

void store_group(uint8_t* to, const wide_int (&values)[group_parts]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Compilers take the bytes out one by one. These leave fours of them in the order of `fours`.
    const __m256i low = _mm256_packs_epi32((__m256i)values[0], (__m256i)values[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)values[2], (__m256i)values[3]);
    const __m256i fours = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), fours);
    memcpy(to, &bytes, sizeof bytes);
#else
    typedef int8_t wide_byte __attribute__((vector_size(wide_lanes)));
    for (int i = 0; i < group_parts; ++i)
        write(to + i * wide_lanes, __builtin_convertvector(values[i], wide_byte));
#endif
}

// Scale = largest magnitude / 127, so values are within -127 and 127. A group with a NaN or an
// infinity gets that for its scale, and y with it.
template <class Source>
void quantize_row(const Source* x, int64_t k, const Rows& rows) {
    for (int64_t g = 0; g < rows.k / group_size; ++g) {
        const int64_t at = g * group_size;
        wide_float parts[group_parts];
        for (int i = 0; i < group_parts; ++i)
            parts[i] = load_up_to(x + at + i * wide_lanes, k - at - i * wide_lanes);
        const float scale = largest_magnitude(parts) * (1.0f / 127.0f);
        const wide_float inverse = wide_splat(scale > 0 ? 1.0f / scale : 0.0f);
        wide_int values[group_parts], sums{};
        for (int i = 0; i < group_parts; ++i) {
            values[i] = round_to_int(parts[i] * inverse);
            sums += values[i];
        }
        store_group(rows.values + at, values);
        const int32_t sum = folded(sums, [](auto a, auto b) { return a + b; });
        rows.scales[g * rows.scale_stride] = scale;
        rows.sums[g * rows.scale_stride] = sum;
        rows.scaled_sums[g * rows.scale_stride] = scale * float(sum);
    }
}

template <class Source>
void prepare_row_of(const Source* x, int64_t k, const Rows& rows) {
    switch (rows.form) {
        case Form::f32: return convert_row(x, k, rows.k, reinterpret_cast<float*>(rows.values));
        case Form::bf16: return convert_row(x, k, rows.k, reinterpret_cast<bf16*>(rows.values));
        case Form::int8: return quantize_row(x, k, rows);
    }
}

void prepare_row(Number number, const void* x, int64_t k, const Rows& rows) {
    if (number == Number::f32)
        prepare_row_of(static_cast<const float*>(x), k, rows);
    else
        prepare_row_of(static_cast<const bf16*>(x), k, rows);
}

}  // namespace
}  // namespace inflight
