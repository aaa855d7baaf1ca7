"""A client's frozen ask: Request, SamplingConfig, OutputConfig, with their validation.

Names are those of TensorRT-LLM's Executor API in snake_case. Ranges that need no engine are checked
here, when the object is made; ranges that depend on the engine (``max_seq_len``, vocabulary size,
``max_queue_size``) are checked by ``enqueue_request``. Every fault raises InvalidRequestError or
UnsupportedRequestError, whose text names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.api.kv import KvCacheRetentionConfig
from inflight.errors import InvalidRequestError

MAX_STOP_WORDS = 64
MAX_STOP_WORD_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_CACHE_SALT_LENGTH = 256
MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e6
"""Above it all tokens are equally likely, to float32."""
PENALTY_LIMIT = 1e6
"""Of the penalties, on both sides of 0; a repetition penalty is at least 1 divided by it."""


def check_range(name: str, value: float | None, low: float, high: float, limit: str) -> None:
    """Raises InvalidRequestError unless ``value`` is None or finite with low <= value <= high."""
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(name, value, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen.

    Nothing about sampling set (temperature, top_k, top_p, min_p all unset) means greedy. Any of
    them set means sampling, with the others neutral. ``top_p`` 0 and ``top_k`` 0 count as unset;
    ``temperature`` 0 and ``top_k`` 1 mean greedy.
    """

    temperature: float | None = None
    """0..MAX_TEMPERATURE; 0 = greedy; neutral 1."""
    top_k: int | None = None
    """>= 0; keep the k likeliest tokens; 0 = unset."""
    top_p: float | None = None
    """0..1; keep the smallest set of tokens whose probability reaches top_p; 0 = unset."""
    min_p: float | None = None
    """0..1; drop tokens less likely than min_p times the likeliest; 0 = unset."""
    seed: int | None = None
    """0..2**64-1; None = fresh entropy. A draw depends on (seed, sequence_index, position)."""
    repetition_penalty: float = 1.0
    """1e-6..1e6; a seen token's logit is divided by it if positive, multiplied if negative."""
    presence_penalty: float = 0.0
    """-2..2 is usual, -1e6..1e6 is taken; subtracted once from each seen token's logit."""
    frequency_penalty: float = 0.0
    """-1e6..1e6; subtracted from a token's logit once for each time it was seen."""
    min_tokens: int = 0
    """>= 0; end ids cannot be chosen before this many tokens."""
    beam_width: int = 1
    """Only 1 is served; other widths are refused by the engine's max_beam_width."""
    num_return_sequences: int = 1
    """Only 1 is served."""

    def __post_init__(self) -> None:
        check_range(
            "temperature", self.temperature, 0, MAX_TEMPERATURE, "must be between 0 and 1e6"
        )
        check_range("top_k", self.top_k, 0, 2**31 - 1, "must be 0 or larger")
        check_range("top_p", self.top_p, 0, 1, "must be between 0 and 1")
        check_range("min_p", self.min_p, 0, 1, "must be between 0 and 1")
        check_range("seed", self.seed, 0, MAX_SEED, "must be between 0 and 2**64-1")
        check_range("min_tokens", self.min_tokens, 0, 2**31 - 1, "must be 0 or larger")
        check_range("beam_width", self.beam_width, 1, 2**31 - 1, "must be 1 or larger")
        check_range(
            "num_return_sequences", self.num_return_sequences, 1, 2**31 - 1, "must be 1 or larger"
        )
        check_range(
            "repetition_penalty",
            self.repetition_penalty,
            1 / PENALTY_LIMIT,
            PENALTY_LIMIT,
            "must be between 1e-6 and 1e6",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check_range(
                name, getattr(self, name), -PENALTY_LIMIT, PENALTY_LIMIT, "must be within +-1e6"
            )

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken without a draw."""
        if self.temperature == 0 or self.top_k == 1:
            return True
        return self.temperature is None and not self.top_k and not self.top_p and not self.min_p

    @property
    def has_penalties(self) -> bool:
        """True when the tokens seen so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What a client wants back besides the tokens."""

    return_log_probs: bool = False
    exclude_input_from_output: bool = True
    """False: the first Result starts with the prompt's own tokens (text included)."""
    return_perf_metrics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request.

    ``stop_words`` match on text, across token borders, and never show in the output.
    ``stop_token_sequences`` match on token ids (TensorRT-LLM's ``stop_words_list``); the matched
    ids are not sent either. ``bad_words`` are token id sequences whose last token is banned
    wherever the tokens before it stand.
    """

    input_token_ids: tuple[int, ...]
    """1..max_seq_len-1 ids, each in [0, vocab_size)."""
    max_tokens: int
    """>= 1; prompt + max_tokens may not exceed the engine's max_seq_len."""
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_ids: tuple[int, ...] | None = None
    """None: the checkpoint's own end ids. Empty: generate to max_tokens."""
    stop_words: tuple[str, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit before everything else."""
    priority: float = 0.5
    """0..1; a higher priority goes first, and waiting raises it (no starvation)."""
    client_id: str | None = None
    """The caller's own id; must not be in flight already."""
    cache_salt: str | None = None
    """Requests reuse each other's KV blocks only where their salts are equal."""
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    """How long its KV blocks are worth keeping; None = all with the default priority."""
    allotted_time_ms: float | None = None
    """> 0; after this many milliseconds the request ends as TIMED_OUT with what it has."""

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise InvalidRequestError(
                "input_ids", (), "is empty: a prompt needs at least one token"
            )
        check_range("max_tokens", self.max_tokens, 1, 2**31 - 1, "must be 1 or larger")
        check_range("priority", self.priority, 0, 1, "must be between 0 and 1")
        if self.allotted_time_ms is not None and not self.allotted_time_ms > 0:
            raise InvalidRequestError(
                "allotted_time_ms", self.allotted_time_ms, "must be larger than 0"
            )
        if len(self.stop_words) > MAX_STOP_WORDS:
            raise InvalidRequestError(
                "stop_words", len(self.stop_words), f"words: at most {MAX_STOP_WORDS} are allowed"
            )
        for word in self.stop_words:
            if not 1 <= len(word) <= MAX_STOP_WORD_LENGTH:
                raise InvalidRequestError(
                    "stop_words", word, f"must have 1 to {MAX_STOP_WORD_LENGTH} characters"
                )
        if len(self.stop_token_sequences) > MAX_STOP_WORDS:
            raise InvalidRequestError(
                "stop_words_list",
                len(self.stop_token_sequences),
                f"words: at most {MAX_STOP_WORDS} are allowed",
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                "bad_words", len(self.bad_words), f"words: at most {MAX_BAD_WORDS} are allowed"
            )
        if any(not sequence for sequence in (*self.stop_token_sequences, *self.bad_words)):
            raise InvalidRequestError("stop_words_list/bad_words", (), "holds an empty word")
        if self.cache_salt is not None and len(self.cache_salt) > MAX_CACHE_SALT_LENGTH:
            raise InvalidRequestError(
                "cache_salt",
                f"{len(self.cache_salt)} characters",
                f"is too long: at most {MAX_CACHE_SALT_LENGTH} are allowed",
            )
        for token_id, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise InvalidRequestError("embedding_bias", bias, f"(id {token_id}) is not finite")
