"""Course: a few sequences, and in which iterations their tokens are computed.

What a probe compares with a plain forward should have been through all that a service does: chunks
of many rows, contexts beside generations, generations alone, and blocks that begin in either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from inflight.api import Request
from inflight.batch import LlmRequest, Phase, ScheduledBatch, ScheduledChunk
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs

_SPARE_BLOCKS = 2
"""So that a block that was never written can be read by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseSequence:
    first_iteration: int
    chunk_ends: tuple[int, ...]
    """Where the chunks of its context end, one chunk an iteration."""
    num_generations: int
    """Iterations of one more token each, behind the context."""

    @property
    def length(self) -> int:
        return self.chunk_ends[-1] + self.num_generations

    @property
    def last_iteration(self) -> int:
        return self.first_iteration + len(self.chunk_ends) + self.num_generations - 1

    def span(self, iteration: int) -> tuple[int, int] | None:
        """Positions [start, end) that this iteration computes; None: the sequence takes no part."""
        if not self.first_iteration <= iteration <= self.last_iteration:
            return None
        place = iteration - self.first_iteration
        last = self.chunk_ends[-1]
        if place >= len(self.chunk_ends):
            start = last + place - len(self.chunk_ends)
            return start, start + 1
        return (self.chunk_ends[place - 1] if place else 0), self.chunk_ends[place]


@dataclass(frozen=True, kw_only=True)
class Course:
    sequences: tuple[CourseSequence, ...]
    borders: tuple[int, ...]
    """Positions that are compared, beside the ends of chunks and every generation."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    @property
    def max_seq_len(self) -> int:
        return max(sequence.length for sequence in self.sequences)

    @cached_property
    def max_num_tokens(self) -> int:
        """Rows of the largest iteration."""
        return max(
            sum(end - start for _, start, end in self._spans(iteration))
            for iteration in range(self._num_iterations)
        )

    @cached_property
    def compared(self) -> tuple[tuple[int, int], ...]:
        """(sequence, position) of each row that is compared, ascending."""
        return tuple(
            (number, position)
            for number, sequence in enumerate(self.sequences)
            for position in sorted(_telling(sequence, self.borders))
        )

    @cached_property
    def rows_by_phase(self) -> tuple[list[int], list[int]]:
        """Which of ``compared`` are computed as context, and which as generations."""
        context: list[int] = []
        generation: list[int] = []
        for row, (number, position) in enumerate(self.compared):
            is_generation = position >= self.sequences[number].chunk_ends[-1]
            (generation if is_generation else context).append(row)
        return context, generation

    def num_blocks(self, tokens_per_block: int) -> int:
        """KV blocks that ``packed_logits`` needs."""
        return _SPARE_BLOCKS + sum(self._blocks_of_each(tokens_per_block))

    def token_ids(self, vocab_size: int) -> Tensor:
        """int64[num_tokens], the sequences one after the other; always the same."""
        ids = np.random.default_rng(0).integers(vocab_size, size=self.num_tokens)
        return torch.from_numpy(ids)

    def plain_logits(self, forward: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        """float32[R, vocab_size] of the rows that are compared. ``forward``: int64[1, T] ->
        [1, T, vocab_size]; it is given a sequence at a time."""
        logits = [forward(ids[None])[0] for ids in self._split(token_ids)]
        rows = [logits[number][position] for number, position in self.compared]
        return torch.stack(rows).float().cpu()

    def packed_logits(
        self,
        forward: Callable[[PackedInputs], Tensor],
        tokens_per_block: int,
        token_ids: Tensor,
    ) -> Tensor:
        """[R, vocab_size], the same rows computed in chunks and generations beside each other.

        ``forward`` has a KV cache of ``num_blocks`` and takes ``max_num_tokens`` rows; it is asked
        for the logits of all but one that is not compared, where there is one.
        """
        return self._computed(forward, self._plans(token_ids), tokens_per_block)

    def whole_logits(
        self,
        forward: Callable[[PackedInputs], Tensor],
        tokens_per_block: int,
        token_ids: Tensor,
    ) -> Tensor:
        """As ``packed_logits`` in one iteration, each sequence a context of one piece; ``forward``
        takes ``num_tokens`` rows."""
        whole = ScheduledBatch(
            0,
            context=tuple(
                ScheduledChunk(request, Phase.CONTEXT, 0, sequence.length, True)
                for request, sequence in zip(self._requests(token_ids), self.sequences, strict=True)
            ),
        )
        return self._computed(forward, [whole], tokens_per_block)

    def _computed(
        self,
        forward: Callable[[PackedInputs], Tensor],
        plans: Iterable[ScheduledBatch],
        tokens_per_block: int,
    ) -> Tensor:
        sizes = self._blocks_of_each(tokens_per_block)
        blocks = np.random.default_rng(1).permutation(self.num_blocks(tokens_per_block))
        tables = np.split(blocks.astype(np.int32), np.cumsum(sizes))
        packer = Packer(
            max_num_tokens=self.num_tokens,
            max_batch_size=len(self.sequences),
            max_blocks_per_sequence=max(sizes),
            tokens_per_block=tokens_per_block,
        )
        wanted = set(self.compared)
        found: dict[tuple[int, int], Tensor] = {}
        for plan in plans:
            inputs = packer.pack(plan, tables.__getitem__)
            keys = [
                (chunk.request.request_id, position)
                for chunk in plan.chunks
                for position in range(chunk.start, chunk.end)
            ]
            # As in a service, there is a row that does not sample wherever there are contexts.
            spared = next((row for row, key in enumerate(keys) if key not in wanted), None)
            asked = np.array([row for row in range(len(keys)) if row != spared], dtype=np.int64)
            logits = forward(replace(inputs, logits_indices=asked))
            found.update((keys[row], of) for row, of in zip(asked, logits, strict=True))
        return torch.stack([found[key] for key in self.compared])

    @property
    def _num_iterations(self) -> int:
        return 1 + max(sequence.last_iteration for sequence in self.sequences)

    def _blocks_of_each(self, tokens_per_block: int) -> list[int]:
        return [-(-sequence.length // tokens_per_block) for sequence in self.sequences]

    def _split(self, token_ids: Tensor) -> Sequence[Tensor]:
        return torch.split(token_ids, [sequence.length for sequence in self.sequences])

    def _spans(self, iteration: int) -> Iterator[tuple[int, int, int]]:
        """Sequence, start and end of what is computed."""
        for number, sequence in enumerate(self.sequences):
            span = sequence.span(iteration)
            if span is not None:
                yield number, *span

    def _requests(self, token_ids: Tensor) -> list[LlmRequest]:
        return [_request(number, ids.tolist()) for number, ids in enumerate(self._split(token_ids))]

    def _plans(self, token_ids: Tensor) -> Iterator[ScheduledBatch]:
        requests = self._requests(token_ids)
        for iteration in range(self._num_iterations):
            context: list[ScheduledChunk] = []
            generation: list[ScheduledChunk] = []
            for number, start, end in self._spans(iteration):
                is_generation = start >= self.sequences[number].chunk_ends[-1]
                phase = Phase.GENERATION if is_generation else Phase.CONTEXT
                chunk = ScheduledChunk(requests[number], phase, start, end - start, is_generation)
                (generation if is_generation else context).append(chunk)
            yield ScheduledBatch(iteration, context=tuple(context), generation=tuple(generation))


def _telling(sequence: CourseSequence, borders: tuple[int, ...]) -> set[int]:
    """Positions of a sequence that are compared."""
    ends = sequence.chunk_ends
    starts = (0, *ends[:-1])
    generations = range(ends[-1], sequence.length)
    found = {*borders, *starts, *(end - 1 for end in ends), *generations}
    return {position for position in found if position < sequence.length}


def _request(number: int, token_ids: list[int]) -> LlmRequest:
    return LlmRequest(
        number,
        Request(input_token_ids=tuple(token_ids), max_tokens=1),
        arrival_time=0.0,
        rank=0.0,
        end_ids=(),
        seed=0,
    )


SHORT = Course(
    sequences=(
        CourseSequence(first_iteration=0, chunk_ends=(5, 11), num_generations=1),
        CourseSequence(first_iteration=0, chunk_ends=(7, 9, 12), num_generations=0),
    ),
    borders=tuple(range(12)),
)
"""For models of so few positions that ``THOROUGH`` does not fit."""

THOROUGH = Course(
    sequences=(
        CourseSequence(first_iteration=0, chunk_ends=(40, 97, 127), num_generations=2),
        CourseSequence(first_iteration=0, chunk_ends=(31,), num_generations=4),
        CourseSequence(first_iteration=1, chunk_ends=(15,), num_generations=3),
        CourseSequence(first_iteration=1, chunk_ends=(10, 33), num_generations=2),
    ),
    borders=(15, 16, 31, 32, 63, 64),
)
"""Blocks of 16 to 128 tokens begin in a context and in a generation; iterations have 71, 83, 55, 4
and 4 rows (kernels change at 11, 16 and 32), with up to four generations."""


def course_for(max_position_embeddings: int) -> Course:
    """The course that every runner is proved with: THOROUGH, which takes about what a prompt of 400
    tokens does, but for models that take no sequence of its length."""
    return THOROUGH if max_position_embeddings >= THOROUGH.max_seq_len else SHORT
