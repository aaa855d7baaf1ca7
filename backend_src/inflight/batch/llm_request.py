"""LlmRequest: the engine's mutable record of one request, and its legal moves."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from inflight.api.request import Request
from inflight.api.response import FinishReason


class RequestState(IntEnum):
    """Ordered; a request holds KV blocks exactly in the two IN_PROGRESS states."""

    QUEUED = 0
    CONTEXT_IN_PROGRESS = 1
    GENERATION_IN_PROGRESS = 2
    GENERATION_COMPLETE = 3


class LlmRequest:
    """One request inside the engine. Only ``engine.loop`` calls the methods that change it.

    Tokens are one growing array: the prompt, then what was generated. ``context_position`` tokens
    of it have their KV computed (or reused). A context phase computes up to ``context_length``
    tokens: the prompt at first, and after a pause everything there was. In the generation phase
    exactly one token is uncomputed: the last one.
    """

    __slots__ = (
        "request_id",
        "request",
        "rank",
        "arrival_time",
        "state",
        "context_position",
        "context_length",
        "finish_reason",
        "num_pauses",
        "end_ids",
        "seed",
        "prompt_length",
        "_tokens",
        "_read_only_tokens",
        "_num_tokens",
    )

    def __init__(
        self,
        request_id: int,
        request: Request,
        *,
        arrival_time: float,
        rank: float,
        end_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        """``rank``: smaller goes first (scheduler.rank_of); ``arrival_time``: clock seconds."""
        self.request_id = request_id
        self.request = request
        self.rank = rank
        self.arrival_time = arrival_time
        self.state = RequestState.QUEUED
        self.context_position = 0
        self.prompt_length = len(request.input_token_ids)
        self.context_length = self.prompt_length
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_pauses = 0
        self.end_ids = end_ids
        self.seed = seed
        self._tokens = np.empty(self.prompt_length + request.max_tokens, dtype=np.int32)
        self._tokens[: self.prompt_length] = request.input_token_ids
        self._read_only_tokens = self._tokens.view()
        self._read_only_tokens.flags.writeable = False
        self._num_tokens = self.prompt_length

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Prompt + generated ids, a read-only view, int32[num_tokens]."""
        return self._read_only_tokens[: self._num_tokens]

    def token_at(self, position: int) -> int:
        """One id of ``token_ids``, faster than through the view."""
        assert position < self._num_tokens
        return self._tokens.item(position)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_generated_tokens(self) -> int:
        return self._num_tokens - self.prompt_length

    @property
    def max_total_tokens(self) -> int:
        """Prompt + max_tokens: what this request may grow to."""
        return len(self._tokens)

    @property
    def remaining_context(self) -> int:
        """Context tokens still to compute; 0 in the generation phase."""
        return self.context_length - self.context_position

    @property
    def is_started(self) -> bool:
        """True while the request holds KV blocks."""
        return RequestState.QUEUED < self.state < RequestState.GENERATION_COMPLETE

    @property
    def in_generation(self) -> bool:
        return self.state is RequestState.GENERATION_IN_PROGRESS

    def advance(self, start: int, num_tokens: int) -> None:
        """The KV of [start, start + num_tokens) is computed; [0, start) was before, or reused."""
        assert self.state < RequestState.GENERATION_COMPLETE
        self.context_position = start + num_tokens
        assert self.context_position <= self._num_tokens
        if self.state is not RequestState.GENERATION_IN_PROGRESS:
            done = self.context_position >= self.context_length
            self.state = (
                RequestState.GENERATION_IN_PROGRESS if done else RequestState.CONTEXT_IN_PROGRESS
            )

    def append(self, token_id: int) -> None:
        """Adds a sampled token; its KV is not computed yet."""
        assert self.in_generation and self.context_position == self._num_tokens
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1

    def pause(self) -> None:
        """Back to the queue, to replay everything there is as context; its blocks are released."""
        assert self.is_started
        self.state = RequestState.QUEUED
        self.context_position = 0
        self.context_length = self._num_tokens
        self.num_pauses += 1

    def finish(self, reason: FinishReason) -> None:
        assert self.state < RequestState.GENERATION_COMPLETE
        self.state = RequestState.GENERATION_COMPLETE
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.name}, "
            f"{self.context_position}/{self._num_tokens}/{self.max_total_tokens})"
        )
