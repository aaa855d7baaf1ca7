// The kernels of elementwise.h, once for every instruction set: include it after defining
// INFLIGHT_ISA as the namespace they go to.
#include <cmath>

#include "common_vectors.h"
#include "elementwise.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

template <class Out>
void norm_row(const RmsNorm& op, int64_t row) {
    float* residual = op.residual + row * op.width;
    f32x16 squares = {};
    for (int64_t i = 0; i < op.width; i += lanes) {
        f32x16 x = load(residual + i);
        if (op.delta) {
            x += load(op.delta + row * op.width + i);
            store(residual + i, x);
        }
        squares += x * x;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / float(op.width) + op.epsilon);
    Out* out = static_cast<Out*>(op.out) + row * op.width;
    for (int64_t i = 0; i < op.width; i += lanes) {
        const f32x16 weight = load(op.weight + i) + op.weight_offset;
        store(out + i, load(residual + i) * factor * weight);
    }
}

f32x16 activated(Activation activation, f32x16 x) {
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

}  // namespace

void rms_norm_rows(const RmsNorm& op, int64_t begin, int64_t end) {
    const auto norm = op.out_is_bf16 ? norm_row<bf16> : norm_row<float>;
    for (int64_t row = begin; row < end; ++row) norm(op, row);
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
