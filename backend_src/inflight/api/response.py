"""What the engine answers: Response (error xor Result), FinishReason, RequestPerfMetrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from inflight.errors import RequestError


class FinishReason(Enum):
    """Why a request ended; the numbers are TensorRT-LLM's, ``text`` is what clients see."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5

    @property
    def text(self) -> str:
        """ "" while running, else "stop", "length", "timed_out" or "cancelled"."""
        return _FINISH_TEXT[self]


_FINISH_TEXT = {
    FinishReason.NOT_FINISHED: "",
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timed_out",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPerfMetrics:
    """Times (nanoseconds of the monotonic clock; 0 = never) and KV blocks of one request."""

    arrival_time_ns: int
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_pauses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is new of one request since its Result before this one.

    ``output_token_ids`` of all Results of a request, concatenated, are its output; so is ``text``.
    A stateless detokenizer gets the same text as
    ``decode(prefix_token_ids + output_token_ids)[len(decode(prefix_token_ids)):][:text_length]``.
    """

    is_final: bool
    output_token_ids: tuple[int, ...] = ()
    text: str = ""
    """"" where the executor has no tokenizer."""
    prefix_token_ids: tuple[int, ...] = ()
    text_length: int = 0
    """Characters to emit; smaller than what the ids decode to where a stop word cuts a token."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Generated tokens in this Result, without end ids and without an echoed prompt."""
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    stop_reason: str = ""
    """The stop word that matched, or the end id as a number; "" for the other finish reasons."""
    log_probs: tuple[float, ...] = ()
    """One natural logarithm for each generated token of this Result; () unless asked for."""
    cum_log_prob: float = 0.0
    """Sum over the whole output so far; 0.0 unless asked for."""
    sequence_index: int = 0
    decoding_iter: int = 0
    perf_metrics: RequestPerfMetrics | None = None
    """Set on the final Result when asked for."""

    @staticmethod
    def merge(parts: Sequence[Result]) -> Result:
        """One Result that says what these directly following ones (at least one) say together."""
        if len(parts) == 1:
            return parts[0]
        with_ids = next((part for part in parts if part.output_token_ids), parts[-1])
        return replace(
            parts[-1],
            output_token_ids=tuple(chain.from_iterable(part.output_token_ids for part in parts)),
            text="".join(part.text for part in parts),
            prefix_token_ids=with_ids.prefix_token_ids,
            text_length=sum(part.text_length for part in parts),
            num_output_tokens=sum(part.num_output_tokens for part in parts),
            log_probs=tuple(chain.from_iterable(part.log_probs for part in parts)),
        )

    def merged_with(self, later: Result) -> Result:
        """``merge`` of this one and the directly following ``later``."""
        return Result.merge((self, later))


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One message to the owner of a request: a Result or an error, never both.

    An error is always final.
    """

    request_id: int
    client_id: str | None = None
    result: Result | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.error is None):
            raise ValueError("a Response carries a result or an error, and not both")

    @property
    def has_error(self) -> bool:
        return self.error is not None

    @property
    def is_final(self) -> bool:
        return self.result is None or self.result.is_final
