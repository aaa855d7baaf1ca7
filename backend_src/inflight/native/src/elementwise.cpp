// The C functions of elementwise.py: rows are split over the thread team when there is enough work.
#include "elementwise.h"

#include "dispatch.h"
#include "team.h"

namespace inflight {
namespace {

// Elements below which a second thread costs more than it does.
constexpr int64_t worth_a_team = 16384;

template <class Op>
void over_rows(void (*kernel)(const Op&, int64_t, int64_t), const Op& op, int64_t rows) {
    const int64_t team = rows * op.width < worth_a_team ? 1 : team_size();
    Pieces pieces(rows, 2 * team);
    with_team(int(team), [&](int) {
        for (Pieces::Run run; !(run = pieces.take()).empty();) kernel(op, run.first, run.last);
    });
}

constexpr Versions<NormRows> norm{
    portable::norm_rows, INFLIGHT_IF_AVX2(avx2::norm_rows), INFLIGHT_IF_AVX512(avx512::norm_rows),
    nullptr};
constexpr Versions<CopyRows> copying{
    portable::copy_rows, INFLIGHT_IF_AVX2(avx2::copy_rows), INFLIGHT_IF_AVX512(avx512::copy_rows),
    nullptr};
constexpr Versions<ActivatedRows> activating{
    portable::activated_rows, INFLIGHT_IF_AVX2(avx2::activated_rows),
    INFLIGHT_IF_AVX512(avx512::activated_rows), nullptr};
constexpr Versions<GatedProductRows> gated{
    portable::gated_rows, INFLIGHT_IF_AVX2(avx2::gated_rows),
    INFLIGHT_IF_AVX512(avx512::gated_rows), nullptr};
constexpr Versions<EmbeddingRows> embedding{
    portable::embedding_rows, INFLIGHT_IF_AVX2(avx2::embedding_rows),
    INFLIGHT_IF_AVX512(avx512::embedding_rows), nullptr};

}  // namespace
}  // namespace inflight

using namespace inflight;

INFLIGHT_API void inflight_norm(const float* x, const float* weight, const float* bias, void* out,
                                int64_t rows, int64_t width, float epsilon, int64_t is_centered,
                                int64_t target) {
    const Norm op{x, weight, bias, out, width, epsilon, is_centered != 0, Target(target)};
    over_rows(norm.chosen(), op, rows);
}

INFLIGHT_API void inflight_copy(const float* x, void* out, int64_t rows, int64_t width,
                                int64_t out_is_bf16) {
    over_rows(copying.chosen(), Copy{x, out, width, out_is_bf16 != 0}, rows);
}

INFLIGHT_API void inflight_activate(void* data, int64_t rows, int64_t width, int64_t activation,
                                    int64_t is_bf16) {
    const Activated op{data, width, PlainActivation(activation), is_bf16 != 0};
    over_rows(activating.chosen(), op, rows);
}

INFLIGHT_API void inflight_gated_product(const void* gate_up, void* out, int64_t rows,
                                         int64_t width, int64_t activation, int64_t in_is_bf16,
                                         int64_t out_is_bf16) {
    const GatedProduct op{gate_up, out, width, Activation(activation), in_is_bf16 != 0,
                          out_is_bf16 != 0};
    over_rows(gated.chosen(), op, rows);
}

// Returns 0 and writes nothing when an id is not a row of the table.
INFLIGHT_API int64_t inflight_embed(const void* table, int64_t vocab_size, const int64_t* ids,
                                    float* out, int64_t rows, int64_t width, float scale,
                                    int64_t table_is_bf16) {
    for (int64_t row = 0; row < rows; ++row)
        if (ids[row] < 0 || ids[row] >= vocab_size) return 0;
    const Embedding op{table, ids, out, width, scale, table_is_bf16 != 0};
    over_rows(embedding.chosen(), op, rows);
    return 1;
}
