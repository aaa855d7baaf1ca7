// K and V in float and bf16, in plain vector loops.
#include "attention_loops.h"
#include "attention_rows.h"

namespace inflight {
namespace portable {

const AttentionKernels of_float{false, write_rows<float, float>,
                                attend_item<LoopProducts<float>>, merge_parts};

const AttentionKernels of_bf16{false, write_rows<float, bf16>,
                               attend_item<LoopProducts<bf16>>, merge_parts};

}  // namespace portable
}  // namespace inflight
