"""PrefixMatch: what the KV cache tells the scheduler of a queued request."""

from __future__ import annotations

from typing import NamedTuple


class PrefixMatch(NamedTuple):
    """What of a waiting request's tokens is already in the cache."""

    num_tokens: int
    """Reusable tokens: whole blocks, never all tokens asked for. Credit for the token budget."""
    num_referenced_blocks: int
    """Those of the reusable blocks that a started request holds: credit for the block budget (the
    others count as free already)."""
