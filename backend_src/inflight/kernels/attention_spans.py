"""Where a tile of attention begins, which keys its rows see, and how splits share them."""

from __future__ import annotations

from inflight.kernels.language import jit, tl


@jit()
def first_row_of(
    tile: tl.tensor,
    starts_ptr: tl.tensor,
    first_sequence: tl.tensor,
    num_sequences: tl.tensor,
    TOKENS: tl.constexpr,
    IS_GENERATION: tl.constexpr,
) -> tl.tensor:
    """The sequence of a tile, and which of its tokens in this iteration is the tile's first."""
    if IS_GENERATION:
        sequence = first_sequence + tile
        first_token = 0
    else:
        sequence = _sequence_of(tile, starts_ptr, num_sequences, TOKENS)
        first_token = (tile - _first_tile(sequence, starts_ptr, TOKENS)) * TOKENS
    return sequence, first_token


@jit()
def _sequence_of(
    tile: tl.tensor, starts_ptr: tl.tensor, num_sequences: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The last sequence whose first tile is not after ``tile``."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if _first_tile(middle, starts_ptr, TOKENS) <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit()
def _first_tile(sequence: tl.tensor, starts_ptr: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Found without a sum over the sequences before: each has a tile more than whole ones fit into
    its rows, which is enough wherever it starts. Some tiles are empty then."""
    return tl.load(starts_ptr + sequence) // TOKENS + sequence


@jit()
def keys_of(
    first_position: tl.tensor,
    length: tl.tensor,
    window: tl.tensor,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """The keys that some of TOKENS rows from ``first_position`` on see, from a multiple of KEYS."""
    end = tl.minimum(length, first_position + TOKENS)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    return begin, end


@jit()
def keys_per_split(
    begin: tl.tensor, end: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """A multiple of KEYS, as even as that allows."""
    return tl.cdiv(tl.cdiv(end - begin, KEYS), num_splits) * KEYS


@jit()
def share_of(
    split: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_splits: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Begin and end of the keys that ``split`` has; begin >= end: none."""
    per_split = keys_per_split(begin, end, num_splits, KEYS)
    begin += split * per_split
    return begin, tl.minimum(end, begin + per_split)
