"""What a runner makes of a text that it is given: logits of every position, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from inflight.api import Request
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Of logits from a reference."""

    error: float
    """Root mean square of the difference, relative to the spread of the reference."""
    agreement: float
    """Share of positions with the same likeliest token."""


class TextReader:
    """Computes windows of a text as contexts of one piece each. Uses up the runner's KV cache."""

    def __init__(self, runner: ModelRunner, *, window: int, tokens_per_block: int) -> None:
        """``runner`` has no KV cache yet, and takes ``window`` rows."""
        num_blocks = -(-window // tokens_per_block)
        runner.allocate_kv_cache(num_blocks, tokens_per_block)
        self._runner = runner
        self._table = np.arange(num_blocks, dtype=np.int32)
        self._packer = Packer(
            max_num_tokens=window,
            max_batch_size=1,
            max_blocks_per_sequence=num_blocks,
            tokens_per_block=tokens_per_block,
        )

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """float32[n, vocab_size] of n tokens, at most a window."""
        request = LlmRequest(
            0,
            Request(input_token_ids=tuple(token_ids), max_tokens=1),
            arrival_time=0.0,
            rank=0.0,
            end_ids=(),
            seed=0,
        )
        chunk = ScheduledChunk(request, Phase.CONTEXT, 0, len(token_ids), True)
        inputs = self._packer.pack(ScheduledBatch(0, context=(chunk,)), lambda _: self._table)
        every_row = replace(inputs, logits_indices=np.arange(len(token_ids)))
        logits = self._runner.forward(every_row).logits
        assert logits is not None, "these inputs need logits"
        return logits


def negative_log_likelihoods(logits: Logits, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Of each token after the first, given those before it; e to the power of the mean is the
    perplexity."""
    rows, following = logits[:-1].astype(np.float64), np.asarray(token_ids[1:])
    rows -= rows.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(rows, following[:, None], axis=1)[:, 0]
    surprise: npt.NDArray[np.float64] = np.log(np.exp(rows).sum(axis=1)) - chosen
    return surprise


def deviation(logits: Logits, reference: Logits) -> Deviation:
    error = np.sqrt(np.mean((logits - reference) ** 2, dtype=np.float64)) / reference.std()
    same = logits.argmax(axis=1) == reference.argmax(axis=1)
    return Deviation(error=float(error), agreement=float(same.mean()))
