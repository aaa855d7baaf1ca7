// The kernels of elementwise.h, once for every instruction set: include it after defining
// INFLIGHT_ISA as the namespace they go to.
#include <cmath>

#include "common_vectors.h"
#include "elementwise.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

float mean_of(const float* x, int64_t width) {
    f32x16 total = {};
    for (int64_t i = 0; i < width; i += lanes) total += load(x + i);
    return sum(total) / float(width);
}

template <class Out>
void norm_row(const Norm& op, int64_t row) {
    const float* x = op.x + row * op.width;
    const float mean = op.is_centered ? mean_of(x, op.width) : 0.0f;
    f32x16 squares = {};
    for (int64_t i = 0; i < op.width; i += lanes) {
        const f32x16 value = load(x + i) - mean;
        squares += value * value;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / float(op.width) + op.epsilon);
    Out* out = static_cast<Out*>(op.out) + row * op.width;
    for (int64_t i = 0; i < op.width; i += lanes) {
        f32x16 value = (load(x + i) - mean) * factor * load(op.weight + i);
        if (op.bias) value += load(op.bias + i);
        if (op.target == Target::added_to_float) value += load(out + i);
        store(out + i, value);
    }
}

template <class Out>
void copy_row(const Copy& op, int64_t row) {
    Out* out = static_cast<Out*>(op.out) + row * op.width;
    for (int64_t i = 0; i < op.width; i += lanes) store(out + i, load(op.x + row * op.width + i));
}

// Abramowitz and Stegun, 7.1.26. Absolute error 2e-7; NaN stays NaN. From 10 on it is 1.
INFLIGHT_INLINE f32x16 erf(f32x16 x) {
    const f32x16 size = min(splat(10.0f), max(x, -x));
    const f32x16 t = reciprocal(1.0f + 0.3275911f * size);
    f32x16 p = 1.061405429f * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const f32x16 result = 1.0f - p * t * exp(-size * size);
    return by_parts(x, result, [](wide_float of, wide_float y) { return of < 0.0f ? -y : y; });
}

template <PlainActivation activation>
INFLIGHT_INLINE f32x16 plain(f32x16 x) {
    if (activation == PlainActivation::gelu) return 0.5f * x * (1.0f + erf(0.707106781f * x));
    const f32x16 positive = max(splat(0.0f), x);
    return activation == PlainActivation::relu2 ? positive * positive : positive;
}

INFLIGHT_INLINE f32x16 activated(Activation activation, f32x16 x) {
    if (activation == Activation::silu) return x * reciprocal(1.0f + exp(-x));
    // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), without the loss of digits near u = -1;
    // 1.595769122 = 2 * sqrt(2 / pi)
    return x * reciprocal(1.0f + exp(-1.595769122f * (x + 0.044715f * x * x * x)));
}

template <class In, class Out>
void gated_row(const GatedProduct& op, int64_t row) {
    const In* gate = static_cast<const In*>(op.gate_up) + row * 2 * op.width;
    Out* out = static_cast<Out*>(op.out) + row * op.width;
    for (int64_t i = 0; i < op.width; i += lanes)
        store(out + i, activated(op.activation, load(gate + i)) * load(gate + op.width + i));
}

template <class Table>
void embedding_row(const Embedding& op, int64_t row) {
    const Table* from = static_cast<const Table*>(op.table) + op.ids[row] * op.width;
    for (int64_t i = 0; i < op.width; i += lanes)
        store(op.out + row * op.width + i, load(from + i) * op.scale);
}

template <class Number, f32x16 of(f32x16)>
void activated_row(const Activated& op, int64_t row) {
    Number* data = static_cast<Number*>(op.data) + row * op.width;
    for (int64_t i = 0; i < op.width; i += lanes) store(data + i, of(load(data + i)));
}

INFLIGHT_INLINE f32x16 gelu_tanh(f32x16 x) { return activated(Activation::gelu_tanh, x); }

template <class Number>
void activate_rows(const Activated& op, int64_t begin, int64_t end) {
    void (*row_of)(const Activated&, int64_t) = nullptr;
    switch (op.activation) {
        case PlainActivation::relu: row_of = activated_row<Number, plain<PlainActivation::relu>>; break;
        case PlainActivation::relu2:
            row_of = activated_row<Number, plain<PlainActivation::relu2>>;
            break;
        case PlainActivation::gelu: row_of = activated_row<Number, plain<PlainActivation::gelu>>; break;
        case PlainActivation::gelu_tanh: row_of = activated_row<Number, gelu_tanh>; break;
    }
    for (int64_t row = begin; row < end; ++row) row_of(op, row);
}

}  // namespace

void norm_rows(const Norm& op, int64_t begin, int64_t end) {
    const auto norm = op.target == Target::bf16_numbers ? norm_row<bf16> : norm_row<float>;
    for (int64_t row = begin; row < end; ++row) norm(op, row);
}

void copy_rows(const Copy& op, int64_t begin, int64_t end) {
    const auto copy = op.out_is_bf16 ? copy_row<bf16> : copy_row<float>;
    for (int64_t row = begin; row < end; ++row) copy(op, row);
}

void activated_rows(const Activated& op, int64_t begin, int64_t end) {
    if (op.is_bf16)
        activate_rows<bf16>(op, begin, end);
    else
        activate_rows<float>(op, begin, end);
}

void gated_rows(const GatedProduct& op, int64_t begin, int64_t end) {
    const auto of_bf16 = op.out_is_bf16 ? gated_row<bf16, bf16> : gated_row<bf16, float>;
    const auto of_float = op.out_is_bf16 ? gated_row<float, bf16> : gated_row<float, float>;
    const auto gate = op.in_is_bf16 ? of_bf16 : of_float;
    for (int64_t row = begin; row < end; ++row) gate(op, row);
}

void embedding_rows(const Embedding& op, int64_t begin, int64_t end) {
    const auto embed = op.table_is_bf16 ? embedding_row<bf16> : embedding_row<float>;
    for (int64_t row = begin; row < end; ++row) embed(op, row);
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
