"""The probe: at load, one small packed computation must equal the model's own plain forward.

It stands between a model whose code changed, or whose attention reads something that the plugin is
not given, and a service that answers fluently and wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inflight.api import Request
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk
from inflight.errors import CheckpointError
from inflight.model.attention import AttentionBackend
from inflight.model.loading import one_line
from inflight.model.packed_model import PackedModel
from inflight.model.packing import Int64Array, Packer

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest typical error of the logits relative to their spread, by the model's dtype. Wrong
attention shows as about 1; below these values is what rounding does."""

_LENGTH = 12
_NUM_BLOCKS = 12


def probe(model: PackedModel, backend: AttentionBackend) -> None:
    """Raises CheckpointError when packed logits are not the plain ones.

    Two sequences are computed in chunks beside each other, the end of one as a generation, and all
    their rows are compared. ``backend`` is new and of no use afterwards.
    """
    token_ids = np.random.default_rng(0).integers(model.vocab_size, size=(2, _LENGTH))
    try:
        packed = _packed_logits(model, backend, token_ids).float()
        plain = model.plain_logits(torch.from_numpy(token_ids)).float().cpu()
    except Exception as error:
        raise CheckpointError(
            f"architecture {model.architecture} is not served: the probe failed: {one_line(error)}"
        ) from error
    error_of_rows = (packed - plain).pow(2).mean(-1).sqrt()
    spread_of_rows = plain.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    # In low precision a near-tie can send a row of a mixture-of-experts model to another expert:
    # one row in four may be off, as no wrong attention would have it.
    quantile = 1.0 if model.dtype is torch.float32 else 0.75
    deviation = float((error_of_rows / spread_of_rows).quantile(quantile))
    if not deviation <= TOLERANCE[model.dtype]:
        raise CheckpointError(
            f"architecture {model.architecture} is not served: packed and plain logits differ by "
            f"{deviation:.2g} of their spread, more than {TOLERANCE[model.dtype]:g}"
        )


def _packed_logits(model: PackedModel, backend: AttentionBackend, token_ids: Int64Array) -> Tensor:
    """int64[2, n] -> logits [2, n, vocab_size] on the CPU, computed in three iterations."""
    tokens_per_block = min(backend.supported_tokens_per_block, default=4)
    blocks = np.random.default_rng(1).permutation(_NUM_BLOCKS).astype(np.int32)
    tables = blocks.reshape(2, -1)[:, : -(-_LENGTH // tokens_per_block)]
    backend.allocate(model.layers, num_blocks=_NUM_BLOCKS, tokens_per_block=tokens_per_block)
    packer = Packer(
        max_num_tokens=2 * _LENGTH,
        max_batch_size=2,
        max_blocks_per_sequence=tables.shape[1],
        tokens_per_block=tokens_per_block,
    )
    logits: dict[tuple[int, int], Tensor] = {}
    for plan in _plans(token_ids):
        inputs = packer.pack(plan, tables.__getitem__)
        every_row = replace(inputs, logits_indices=np.arange(plan.num_tokens))
        rows = iter(model.forward(every_row, backend).cpu())
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                logits[chunk.request.request_id, position] = next(rows)
    return torch.stack([logits[key] for key in sorted(logits)]).view(*token_ids.shape, -1)


def _plans(token_ids: Int64Array) -> Iterator[ScheduledBatch]:
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
    last = _LENGTH - 1

    def context(request: LlmRequest, start: int, end: int) -> ScheduledChunk:
        return ScheduledChunk(request, Phase.CONTEXT, start, end - start, False)

    yield ScheduledBatch(0, context=(context(first, 0, 5), context(second, 0, 7)))
    yield ScheduledBatch(1, context=(context(first, 5, last), context(second, 7, 9)))
    yield ScheduledBatch(
        2,
        context=(context(second, 9, _LENGTH),),
        generation=(ScheduledChunk(first, Phase.GENERATION, last, 1, True),),
    )
