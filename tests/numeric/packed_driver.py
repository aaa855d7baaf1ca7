"""Drives a ModelRunner as the engine would, but with known tokens: every row's logits come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from inflight.api import Request
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner


def request_of(request_id: int, tokens: Sequence[int]) -> LlmRequest:
    """A request whose prompt is all of ``tokens``: what the packer reads of it."""
    return LlmRequest(
        request_id,
        Request(input_token_ids=tuple(int(token) for token in tokens), max_tokens=1),
        arrival_time=0.0,
        rank=0.0,
        end_ids=(),
        seed=0,
    )


def staggered_plans(
    requests: Sequence[LlmRequest],
    prompt_lengths: Sequence[int],
    *,
    chunk: int,
    most_context_tokens: int,
) -> Iterator[ScheduledBatch]:
    """One request joins each iteration; prompts go in chunks, then one token an iteration."""
    done = [0] * len(requests)
    iteration = 0
    while any(at < request.num_tokens for at, request in zip(done, requests, strict=True)):
        budget = most_context_tokens
        context, generation = [], []
        for i, request in enumerate(requests[: iteration + 1]):
            start = done[i]
            if start >= prompt_lengths[i]:
                if start < request.num_tokens:
                    generation.append(ScheduledChunk(request, Phase.GENERATION, start, 1, True))
                    done[i] += 1
            elif size := min(chunk, budget, prompt_lengths[i] - start):
                context.append(ScheduledChunk(request, Phase.CONTEXT, start, size, False))
                done[i] += size
                budget -= size
        yield ScheduledBatch(iteration, context=tuple(context), generation=tuple(generation))
        iteration += 1


def shuffled_block_tables(
    lengths: Sequence[int], tokens_per_block: int, num_blocks: int, *, seed: int
) -> list[npt.NDArray[np.int32]]:
    blocks = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    counts = [-(-length // tokens_per_block) for length in lengths]
    assert sum(counts) <= num_blocks
    return np.split(blocks[: sum(counts)], np.cumsum(counts)[:-1])


def logits_of_all_rows(
    runner: ModelRunner,
    plans: Iterator[ScheduledBatch],
    tables: Sequence[npt.NDArray[np.int32]],
    tokens_per_block: int,
) -> dict[tuple[int, int], npt.NDArray[np.float32]]:
    """(request id, position) -> float32[vocab_size]; request ids are indices into ``tables``."""
    packer = Packer(
        max_num_tokens=256,
        max_batch_size=len(tables),
        max_blocks_per_sequence=max(len(table) for table in tables),
        tokens_per_block=tokens_per_block,
    )
    logits = {}
    for plan in plans:
        inputs = packer.pack(plan, tables.__getitem__)
        output = runner.forward(replace(inputs, logits_indices=np.arange(plan.num_tokens)))
        assert output.logits is not None
        rows = iter(output.logits)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                logits[chunk.request.request_id, position] = next(rows)
    return logits
