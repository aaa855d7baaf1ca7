"""The kernels of this device compute what torch does: looked at whenever a model is loaded."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from inflight.kernels.kv_layout import KvShape
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.ops import DeviceOps
from inflight.model.device.rows import RowBuffer
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.device.staging import RowLimits
from inflight.model.device.torch_ops import TorchOps
from inflight.model.probe import check_rows, check_typical, flipping
from inflight.model.probe_course import course_for
from inflight.model.runner import PackedInputs

_LOG = logging.getLogger(__name__)

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def prove_kernels(
    decoder: DeviceDecoder, shape: KvShape, tokens_per_block: int, runtime: DeviceRuntime
) -> float:
    """How far the packed, chunked logits of the decoder's operations typically are from those of
    torch on the same weights, relative to their spread. Raises CheckpointError when that, or what
    any row is off, is more than rounding explains."""
    course = course_for(decoder.spec.max_position_embeddings)
    token_ids = course.token_ids(decoder.spec.vocab_size)
    num_blocks = course.num_blocks(tokens_per_block)
    limits = RowLimits(
        max_num_tokens=course.max_num_tokens,
        max_batch_size=len(course.sequences),
        max_blocks_per_sequence=num_blocks,
        tokens_per_block=tokens_per_block,
    )
    with runtime.computing():
        buffer = RowBuffer(limits, runtime)

        def logits_of(ops: DeviceOps) -> Tensor:
            some = DeviceDecoder(decoder.spec, decoder.weights, ops, max_seq_len=course.max_seq_len)
            storage = shape.allocate(num_blocks, tokens_per_block, runtime.device)

            def forward(inputs: PackedInputs) -> Tensor:
                return runtime.to_host(some.forward(buffer.take(inputs), storage))

            return course.packed_logits(forward, tokens_per_block, token_ids)

        kernels, torchs = logits_of(decoder.ops), logits_of(TorchOps())
    dtype = _DTYPES[decoder.dtype]
    deviation = check_typical(kernels, torchs, "fused", dtype)
    check_rows(kernels, torchs, "fused", dtype, flipping=flipping(course, decoder.spec))
    _LOG.info("logits of the kernels differ from torch's by %.2g of their spread", deviation)
    return deviation
