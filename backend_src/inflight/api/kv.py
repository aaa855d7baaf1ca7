"""What is said about KV blocks from outside the KV cache: PrefixMatch, KvCacheRetentionConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inflight.errors import InvalidRequestError

DEFAULT_RETENTION_PRIORITY = 35
MAX_RETENTION_PRIORITY = 100
MAX_TOKEN_RANGES = 64
MOVED_BYTES = 32 << 20
"""Of KV that is moved between the pool and host memory at once, unless one block has more: so much
may lie for a moment beside what either has room for."""
_MAX_INT32 = 2**31 - 1


class PrefixMatch(NamedTuple):
    """What of a waiting request's tokens is already in the cache."""

    num_tokens: int
    """Reusable tokens: whole blocks, then perhaps a part of one; never all tokens asked for. Credit
    for the token budget."""
    num_referenced_blocks: int
    """Those of the whole reusable blocks that a started request holds: credit for the block budget
    of the first pool (the others count as free already, and of a part the request needs a copy of
    its own). 0 where that pool has a window."""
    next_block: bytes | None = None
    """The name of the first whole block that is not in the cache; None where there is none among
    the tokens asked for. Equal names are equal tokens after equal tokens, under one identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRangeRetentionConfig:
    """How the blocks that hold prompt tokens [token_start, token_end) are kept."""

    token_start: int
    """>= 0."""
    token_end: int | None = None
    """Exclusive, > token_start; None = the end of the prompt."""
    priority: int = DEFAULT_RETENTION_PRIORITY
    """0..100; blocks of a lower priority are evicted first."""
    duration_ms: int | None = None
    """>= 0, from when nobody holds the block any more; then the default priority counts. None =
    for ever."""

    def __post_init__(self) -> None:
        names = "retention_token_range_"
        _check(f"{names}starts", self.token_start, _MAX_INT32)
        if self.token_end is not None and self.token_end <= self.token_start:
            raise InvalidRequestError(
                f"{names}ends", self.token_end, f"must be larger than its start {self.token_start}"
            )
        _check(f"{names}priorities", self.priority, MAX_RETENTION_PRIORITY)
        if self.duration_ms is not None:
            _check(f"{names}durations_ms", self.duration_ms, _MAX_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheRetentionConfig:
    """How long the blocks of a request are worth keeping once nobody holds them.

    A block belongs to the prompt if its first token does; then the ranges that touch it count, and
    of several the one with the highest priority. A block that begins with a generated token has the
    decode priority.
    """

    token_range_retention_configs: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        if len(self.token_range_retention_configs) > MAX_TOKEN_RANGES:
            raise InvalidRequestError(
                "retention_token_range_starts",
                len(self.token_range_retention_configs),
                f"ranges: at most {MAX_TOKEN_RANGES} are allowed",
            )
        _check("retention_decode_priority", self.decode_retention_priority, MAX_RETENTION_PRIORITY)
        if self.decode_duration_ms is not None:
            _check("retention_decode_duration_ms", self.decode_duration_ms, _MAX_INT32)


def _check(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidRequestError(name, value, f"must be between 0 and {most}")
