"""The scheduler's frozen decision for one iteration: ScheduledChunk, ScheduledBatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from inflight.api.stats import BindingLimit
from inflight.batch.llm_request import LlmRequest


class Phase(Enum):
    CONTEXT = "context"
    GENERATION = "generation"


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one request, computed in this iteration.

    In the first chunk of a (re)started request, ``start`` tokens come from reused blocks, the last
    of them perhaps from a part of one; they are fewer than the request has tokens.
    """

    request: LlmRequest
    phase: Phase
    start: int
    num_tokens: int
    samples: bool
    """True when the last computed row yields a token: last context chunk, or generation."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """What one iteration does. The three groups are disjoint.

    Contexts that do not reach their end come first, then contexts that do, then generations, so
    the rows that sample are the tail of the batch. ``paused`` requests lose their blocks before
    anything is computed.
    """

    iteration: int
    context: tuple[ScheduledChunk, ...] = ()
    generation: tuple[ScheduledChunk, ...] = ()
    paused: tuple[LlmRequest, ...] = ()
    binding_limit: BindingLimit = BindingLimit.QUEUE
    """Why it does not do more."""

    @property
    def is_empty(self) -> bool:
        """True when nothing is computed (there may still be pauses)."""
        return not self.context and not self.generation

    @property
    def chunks(self) -> Iterator[ScheduledChunk]:
        """All chunks, in packing order."""
        yield from self.context
        yield from self.generation

    @property
    def num_chunks(self) -> int:
        return len(self.context) + len(self.generation)

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.context)

    @property
    def num_tokens(self) -> int:
        return self.num_context_tokens + len(self.generation)
