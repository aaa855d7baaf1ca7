"""The running softmax of attention: rows of queries against the keys and values of paged blocks.

It is computed online with powers of two: a running maximum of the scores (times log2 e), the sum of
the weights, and the weighted sum of the values.
"""

from __future__ import annotations

from inflight.kernels.functions import tanh
from inflight.kernels.language import jit, tl


@jit()
def sums_before_keys(
    sinks_ptr: tl.tensor,
    heads: tl.tensor,
    is_row: tl.tensor,
    split: tl.tensor,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """The largest score and the sum of weights, of each row. A sink is a key that adds no value;
    the first split has seen it."""
    LOG2E: tl.constexpr = 1.4426950408889634
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        largest = tl.where(split == 0, sinks, largest)
        total += tl.where(split == 0, 1.0, 0.0)
    return largest, total


@jit()
def add_span(
    sums: tl.tuple,
    query: tl.tensor,
    positions: tl.tensor,
    span: tl.tuple,
    place: tl.tuple,
    rules: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> tl.tensor:
    """``sums``, the running softmax (largest score, sum of weights, weighted sum of values), after
    the keys of ``span``: the first row's position, a begin that is a multiple of KEYS, and an end.

    ``place`` (the head's part of the cache, the sequence's table, from keys to values, from block
    to block) says where keys lie, ``rules`` (window, scale, soft-cap) what they count.
    """
    largest, total, summed = sums
    first_position, begin, end = span
    masked = begin
    if not HAS_WINDOW:
        # Most keys are seen by every row of the tile, and need no questions asked.
        masked = tl.minimum(tl.maximum(first_position + 1, begin), end) // KEYS * KEYS
        for first_key in range(begin, masked, KEYS):
            largest, total, summed = _add_keys(
                (largest, total, summed), query, positions, first_key, end, place, rules,
                HEAD_DIM, HEAD_BLOCK, TOKENS_PER_BLOCK, KEYS, False, HAS_WINDOW, HAS_SOFTCAP,
                DOT_IN_FP32,
            )  # fmt: skip
    for first_key in range(masked, end, KEYS):
        largest, total, summed = _add_keys(
            (largest, total, summed), query, positions, first_key, end, place, rules,
            HEAD_DIM, HEAD_BLOCK, TOKENS_PER_BLOCK, KEYS, True, HAS_WINDOW, HAS_SOFTCAP,
            DOT_IN_FP32,
        )  # fmt: skip
    return largest, total, summed


@jit()
def _add_keys(
    sums: tl.tuple,
    query: tl.tensor,
    positions: tl.tensor,
    first_key: tl.tensor,
    end: tl.tensor,
    place: tl.tuple,
    rules: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> tl.tensor:
    """As ``add_span``, of KEYS more keys; IS_MASKED: not all of them count for all rows."""
    largest, total, summed = sums
    head_ptr, table_ptr, value_offset, block_stride = place
    window, scale, softcap = rules
    keys = first_key + tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_BLOCK)
    is_key = keys < end
    is_stored = (dims < HEAD_DIM)[None, :]
    if IS_MASKED:
        # What is not in the sequence is never read: it may hold NaN, and 0 * NaN is NaN.
        is_stored = is_stored & is_key[:, None]
        blocks = tl.load(table_ptr + keys // TOKENS_PER_BLOCK, mask=is_key, other=0)
    else:
        blocks = tl.load(table_ptr + keys // TOKENS_PER_BLOCK)
    places = blocks.to(tl.int64) * block_stride + keys % TOKENS_PER_BLOCK * HEAD_DIM
    key_ptrs = head_ptr + places[:, None] + dims[None, :]
    key = tl.load(key_ptrs, mask=is_stored, other=0.0)
    if DOT_IN_FP32:
        key = key.to(tl.float32)
    scores = _scores(query, key, scale, softcap, HAS_SOFTCAP)
    if IS_MASKED:
        is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
    raised, shrink, weights = _weights(scores, largest)
    value = tl.load(key_ptrs + value_offset, mask=is_stored, other=0.0)
    if DOT_IN_FP32:
        value = value.to(tl.float32)
    total = total * shrink + tl.sum(weights, axis=1)
    summed = summed * shrink[:, None]
    summed = tl.dot(weights.to(value.dtype), value, summed, input_precision="ieee")
    return raised, total, summed


@jit()
def _scores(
    query: tl.tensor,
    key: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """fp32[ROWS, KEYS], times log2 e."""
    LOG2E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = softcap * LOG2E * tanh(scores * (scale / softcap))
    else:
        scores = scores * (scale * LOG2E)
    return scores


@jit()
def _weights(scores: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """The largest score of each row now, what sums so far shrink by, and the weights of scores."""
    raised = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no largest score to subtract.
    subtracted = tl.where(raised == float("-inf"), 0.0, raised)
    return raised, tl.exp2(largest - subtracted), tl.exp2(scores - subtracted[:, None])
