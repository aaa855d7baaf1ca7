// Rows of x in the form that a kernel asks for. Compiled anew for each instruction set.
#pragma once

#include "common_vectors.h"
#include "linear.h"
#include "linear_partial.h"

namespace inflight {
namespace {

template <class Target, class Source>
void convert_row(const Source* x, int64_t k, int64_t padded, Target* values) {
    for (int64_t i = 0; i < padded; i += lanes) store(values + i, load_up_to(x + i, k - i));
}

// As bit patterns magnitudes are in the order of their values, with NaN above all.
float largest_magnitude(f32x16 a, f32x16 b) {
    const u32x16 first = (u32x16)a & 0x7fffffff, second = (u32x16)b & 0x7fffffff;
    const u32x16 larger = first > second ? first : second;
    uint32_t bits = 0;
    for (int i = 0; i < lanes; ++i) bits = larger[i] > bits ? larger[i] : bits;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Nearest even, of magnitudes below 2^22: added to 1.5 * 2^23 it is a whole number in the mantissa.
i32x16 round_to_int(f32x16 value) {
    return (i32x16)(value + splat(12582912.0f)) - 0x4b400000;
}

void store_bytes(uint8_t* to, i32x16 value) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    const i8x16 bytes = __builtin_convertvector(value, i8x16);
    memcpy(to, &bytes, sizeof bytes);
}

int32_t sum_of(i32x16 value) {
    int32_t total = 0;
    for (int i = 0; i < lanes; ++i) total += value[i];
    return total;
}

// Scale = largest magnitude / 127, so values are within -127 and 127. A group with a NaN or an
// infinity gets that for its scale, and y with it.
template <class Source>
void quantize_row(const Source* x, int64_t k, const Rows& rows) {
    for (int64_t g = 0; g < rows.k / group_size; ++g) {
        const int64_t at = g * group_size;
        const f32x16 low = load_up_to(x + at, k - at);
        const f32x16 high = load_up_to(x + at + lanes, k - at - lanes);
        const float scale = largest_magnitude(low, high) * (1.0f / 127.0f);
        const f32x16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
        const i32x16 low_values = round_to_int(low * inverse);
        const i32x16 high_values = round_to_int(high * inverse);
        store_bytes(rows.values + at, low_values);
        store_bytes(rows.values + at + lanes, high_values);
        const int32_t sum = sum_of(low_values + high_values);
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
