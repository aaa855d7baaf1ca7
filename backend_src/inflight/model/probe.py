"""The probe: one small packed computation must equal the model's own plain forward.

It stands between a model whose code changed, or whose attention reads something that the plugin is
not given, or kernels that compute something else on this machine, and a service that answers
fluently and wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api import Request
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk
from inflight.errors import CheckpointError, one_line
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs

if TYPE_CHECKING:
    from inflight.model.attention import AttentionBackend
    from inflight.model.packed_model import PackedModel

TOLERANCE: Mapping[str, float] = {
    "fp32": 1e-3, "bf16": 0.25, "fp16": 0.05, "int8": 0.35, "int4": 0.6,
}  # fmt: skip
"""Largest typical error of the logits relative to their spread, by the dtype of the weights. Wrong
attention shows as about 1 or more; below these values is what rounding does."""

NUM_BLOCKS = 12
MAX_NUM_TOKENS = 24
LENGTH = 12
"""Tokens of each of the probe's two sequences."""


def probe(model: PackedModel, backend: AttentionBackend) -> None:
    """Raises CheckpointError when the packed logits of transformers' classes are not their plain
    ones. ``backend`` is new and of no use afterwards."""
    token_ids = probe_token_ids(model.vocab_size)
    tokens_per_block = min(backend.supported_tokens_per_block, default=4)
    try:
        backend.allocate(model.layers, num_blocks=NUM_BLOCKS, tokens_per_block=tokens_per_block)
        packed = packed_logits(
            lambda inputs: model.forward(inputs, backend).cpu(), tokens_per_block, token_ids
        )
        plain = model.plain_logits(token_ids).float().cpu()
    except Exception as error:
        raise CheckpointError(
            f"architecture {model.architecture} is not served: the probe failed: {one_line(error)}"
        ) from error
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[model.dtype]
    check_equal(packed.flatten(0, 1), plain.flatten(0, 1), model.architecture, dtype)


def probe_token_ids(vocab_size: int) -> Tensor:
    """int64[2, LENGTH], always the same."""
    ids = np.random.default_rng(0).integers(vocab_size, size=(2, LENGTH))
    return torch.from_numpy(ids)


def check_equal(packed: Tensor, plain: Tensor, architecture: str, dtype: str) -> float:
    """Both float32[rows, vocab_size]; ``dtype``: a key of TOLERANCE. Returns how far they differ.

    Raises CheckpointError when that is more than rounding explains.
    """
    error_of_rows = (packed.float() - plain).pow(2).mean(-1).sqrt()
    spread_of_rows = plain.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    # In low precision a near-tie can send a row of a mixture-of-experts model to another expert:
    # one row in four may be off, as no wrong attention would have it.
    quantile = 1.0 if dtype == "fp32" else 0.75
    deviation = float((error_of_rows / spread_of_rows).quantile(quantile))
    if not deviation <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"architecture {architecture} is not served: packed and plain logits differ by "
            f"{deviation:.2g} of their spread, more than {TOLERANCE[dtype]:g}"
        )
    return deviation


def packed_logits(
    forward: Callable[[PackedInputs], Tensor], tokens_per_block: int, token_ids: Tensor
) -> Tensor:
    """int64[2, LENGTH] -> logits [2, LENGTH, vocab_size], in three iterations.

    The sequences are computed in chunks beside each other, the end of one as a generation.
    ``forward`` has a KV cache of NUM_BLOCKS blocks and takes MAX_NUM_TOKENS rows.
    """
    blocks = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)
    tables = blocks.reshape(2, -1)[:, : -(-LENGTH // tokens_per_block)]
    packer = Packer(
        max_num_tokens=MAX_NUM_TOKENS,
        max_batch_size=2,
        max_blocks_per_sequence=tables.shape[1],
        tokens_per_block=tokens_per_block,
    )
    logits: dict[tuple[int, int], Tensor] = {}
    for plan in _plans(token_ids.numpy()):
        inputs = packer.pack(plan, tables.__getitem__)
        every_row = replace(inputs, logits_indices=np.arange(plan.num_tokens))
        rows = iter(forward(every_row))
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                logits[chunk.request.request_id, position] = next(rows)
    return torch.stack([logits[key] for key in sorted(logits)]).view(*token_ids.shape, -1)


def _plans(token_ids: npt.NDArray[np.int64]) -> Iterator[ScheduledBatch]:
    """Contexts that start, contexts that go on, and a context beside a generation."""
    first, second = (
        LlmRequest(
            request_id,
            Request(input_token_ids=tuple(row.tolist()), max_tokens=1),
            arrival_time=0.0,
            rank=0.0,
            end_ids=(),
            seed=0,
        )
        for request_id, row in enumerate(token_ids)
    )
    last = LENGTH - 1

    def context(request: LlmRequest, start: int, end: int) -> ScheduledChunk:
        return ScheduledChunk(request, Phase.CONTEXT, start, end - start, False)

    yield ScheduledBatch(0, context=(context(first, 0, 5), context(second, 0, 7)))
    yield ScheduledBatch(1, context=(context(first, 5, last), context(second, 7, 9)))
    yield ScheduledBatch(
        2,
        context=(context(second, 9, LENGTH),),
        generation=(ScheduledChunk(first, Phase.GENERATION, last, 1, True),),
    )
