"""The kernels of this device compute what torch does: looked at whenever a model is loaded."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from inflight.kernels.kv_layout import KvShape
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.rows import RowBuffer
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.device.staging import RowLimits
from inflight.model.device.torch_ops import TorchOps
from inflight.model.probe import check_typical
from inflight.model.probe_course import SHORT
from inflight.model.runner import PackedInputs

_LOG = logging.getLogger(__name__)

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def prove_kernels(
    decoder: DeviceDecoder, shape: KvShape, tokens_per_block: int, runtime: DeviceRuntime
) -> float:
    """How far the packed, chunked logits of the decoder's operations are from those of torch on the
    same weights, relative to their spread. Raises CheckpointError when that is more than rounding
    explains."""
    reference = DeviceDecoder(
        decoder.spec, decoder.weights, TorchOps(), max_seq_len=decoder.max_seq_len
    )
    num_blocks = SHORT.num_blocks(tokens_per_block)
    limits = RowLimits(
        max_num_tokens=SHORT.max_num_tokens,
        max_batch_size=len(SHORT.sequences),
        max_blocks_per_sequence=num_blocks,
        tokens_per_block=tokens_per_block,
    )
    token_ids = SHORT.token_ids(decoder.spec.vocab_size)
    with runtime.computing():
        buffer = RowBuffer(limits, runtime)

        def logits_of(some: DeviceDecoder) -> Tensor:
            storage = shape.allocate(num_blocks, tokens_per_block, runtime.device)

            def forward(inputs: PackedInputs) -> Tensor:
                return runtime.to_host(some.forward(buffer.take(inputs), storage))

            return SHORT.packed_logits(forward, tokens_per_block, token_ids)

        kernels, torchs = logits_of(decoder), logits_of(reference)
    deviation = check_typical(kernels, torchs, "fused", _DTYPES[decoder.dtype])
    _LOG.info("logits of the kernels differ from torch's by %.2g of their spread", deviation)
    return deviation
