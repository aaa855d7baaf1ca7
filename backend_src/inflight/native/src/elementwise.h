// The operations between the linears, as ranges of rows; one version for each instruction set.
#pragma once

#include <cstdint>

namespace inflight {

enum class Activation : int { silu = 0, gelu_tanh = 1 };  // the numbers are those of elementwise.py

enum class PlainActivation : int { relu, relu2, gelu, gelu_tanh };  // likewise

// What becomes of the numbers of a norm; likewise.
enum class Target : int { float_numbers, bf16_numbers, added_to_float };

struct Norm {
    const float* x;       // [rows][width]
    const float* weight;  // [width], as the bias, which may be null
    const float* bias;
    void* out;  // [rows][width]
    int64_t width;
    float epsilon;
    bool is_centered;  // the mean is taken out first
    Target target;
};

struct Copy {
    const float* x;  // [rows][width]
    void* out;       // likewise
    int64_t width;
    bool out_is_bf16;
};

struct Activated {
    void* data;  // [rows][width], in place
    int64_t width;
    PlainActivation activation;
    bool is_bf16;
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

using NormRows = void (*)(const Norm&, int64_t begin, int64_t end);
using CopyRows = void (*)(const Copy&, int64_t begin, int64_t end);
using ActivatedRows = void (*)(const Activated&, int64_t begin, int64_t end);
using GatedProductRows = void (*)(const GatedProduct&, int64_t begin, int64_t end);
using EmbeddingRows = void (*)(const Embedding&, int64_t begin, int64_t end);

#define INFLIGHT_DECLARE_ELEMENTWISE(isa)                               \
    namespace isa {                                                     \
    void norm_rows(const Norm&, int64_t begin, int64_t end);            \
    void copy_rows(const Copy&, int64_t begin, int64_t end);            \
    void activated_rows(const Activated&, int64_t begin, int64_t end);  \
    void gated_rows(const GatedProduct&, int64_t begin, int64_t end);   \
    void embedding_rows(const Embedding&, int64_t begin, int64_t end);  \
    }
INFLIGHT_DECLARE_ELEMENTWISE(portable)
INFLIGHT_DECLARE_ELEMENTWISE(avx2)
INFLIGHT_DECLARE_ELEMENTWISE(avx512)
#undef INFLIGHT_DECLARE_ELEMENTWISE

}  // namespace inflight
