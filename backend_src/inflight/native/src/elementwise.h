// The operations between the linears, as ranges of rows; one version for each instruction set.
#pragma once

#include <cstdint>

namespace inflight {

enum class Activation : int { silu = 0, gelu_tanh = 1 };  // the numbers are those of elementwise.py

struct RmsNorm {
    float* residual;     // [rows][width]
    const float* delta;  // [rows][width], or null: added to the residual first
    const float* weight;
    void* out;  // [rows][width], bf16 or float
    int64_t width;
    float epsilon, weight_offset;
    bool out_is_bf16;
};

struct GatedProduct {
    const void* gate_up;  // [rows][2 * width]: the gates of a row, then its ups
    void* out;            // [rows][width]
    int64_t width;
    Activation activation;
    bool in_is_bf16, out_is_bf16;
};

struct Embedding {
    const void* table;  // [.][width]
    const int64_t* ids;
    float* out;  // [rows][width]
    int64_t width;
    float scale;
    bool table_is_bf16;
};

using RmsNormRows = void (*)(const RmsNorm&, int64_t begin, int64_t end);
using GatedProductRows = void (*)(const GatedProduct&, int64_t begin, int64_t end);
using EmbeddingRows = void (*)(const Embedding&, int64_t begin, int64_t end);

#define INFLIGHT_DECLARE_ELEMENTWISE(isa)                               \
    namespace isa {                                                     \
    void rms_norm_rows(const RmsNorm&, int64_t begin, int64_t end);     \
    void gated_rows(const GatedProduct&, int64_t begin, int64_t end);   \
    void embedding_rows(const Embedding&, int64_t begin, int64_t end);  \
    }
INFLIGHT_DECLARE_ELEMENTWISE(portable)
INFLIGHT_DECLARE_ELEMENTWISE(avx2)
INFLIGHT_DECLARE_ELEMENTWISE(avx512)
#undef INFLIGHT_DECLARE_ELEMENTWISE

}  // namespace inflight
