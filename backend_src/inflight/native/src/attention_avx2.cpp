// K and V in float, bf16 and int8, in plain vector loops.
#include "attention_loops.h"
#include "attention_rows.h"

namespace inflight {
namespace avx2 {

const AttentionKernels of_float{write_rows<float, float>, attend_item<LoopProducts<float>>,
                                merge_parts};

const AttentionKernels of_bf16{write_rows<float, bf16>, attend_item<LoopProducts<bf16>>,
                               merge_parts};

const AttentionKernels of_int8{write_rows<float, int8_t>, attend_item<LoopProducts<int8_t>>,
                               merge_parts};

}  // namespace avx2
}  // namespace inflight
