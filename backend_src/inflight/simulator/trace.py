"""TraceRequest: one line of a trace, and the token ids that stand for its prompt."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.errors import InflightError

MAX_TOKENS = 1 << 20
"""Of a prompt or of an output in a trace."""

VOCAB_SIZE = (1 << 31) - 1
"""As large as an int32 says, so that different texts hardly ever have equal blocks."""


class TraceError(InflightError):
    """A trace cannot be read. One line that names the file and the line in it."""


class PrefixPiece(NamedTuple):
    """Prompt tokens that are the same wherever a piece has this name and the same pieces before."""

    name: str
    num_tokens: int
    """>= 1. Of two pieces with one name the shorter is the beginning of the longer."""


class TraceRequest(NamedTuple):
    """One request, without its text."""

    arrival: float
    """Seconds since the trace began."""
    input_length: int
    """Prompt tokens, 1..MAX_TOKENS."""
    output_length: int
    """Generated tokens, 1..MAX_TOKENS."""
    prefix: tuple[PrefixPiece, ...] = ()
    """The beginning of the prompt, at most ``input_length`` tokens; the rest is this request's
    alone."""


def prompt_ids(request: TraceRequest, number: int) -> tuple[int, ...]:
    """``input_length`` ids in [0, VOCAB_SIZE). ``number`` tells the request from all others."""
    num_shared = sum(piece.num_tokens for piece in request.prefix)
    own = PrefixPiece(f"request {number}", request.input_length - num_shared)
    pieces = [_piece_ids(f"prefix {piece.name}", piece.num_tokens) for piece in request.prefix]
    if own.num_tokens:
        pieces.append(_piece_ids(own.name, own.num_tokens))
    return tuple(np.concatenate(pieces).tolist())


def _piece_ids(name: str, num_tokens: int) -> npt.NDArray[np.int64]:
    """An arithmetic progression whose start and odd step come from the name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    start = int.from_bytes(digest[:4], "little")
    step = int.from_bytes(digest[4:], "little") | 1
    return (start + step * np.arange(num_tokens, dtype=np.int64)) % VOCAB_SIZE
