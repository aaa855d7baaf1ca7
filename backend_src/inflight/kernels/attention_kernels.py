"""The kernels of attention.py: a tile of rows against a span of keys, and the sum over spans.

Softmax is computed online with powers of two: a running maximum of the scores (times log2 e), the
sum of the weights, and the weighted sum of the values.
"""

from __future__ import annotations

from inflight.kernels.attention_spans import first_row_of, keys_of, keys_per_split, share_of
from inflight.kernels.functions import tanh
from inflight.kernels.language import jit, tl

_VARYING = (
    *("starts_ptr", "lengths_ptr", "tables_ptr"),
    *("first_sequence", "num_sequences", "num_splits", "table_stride", "window"),
)


@jit(_VARYING)
def attend_tile(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    first_sequence: tl.tensor,
    num_sequences: tl.tensor,
    num_splits: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    query_stride: tl.tensor,
    value_offset: tl.tensor,
    block_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_GENERATION: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> None:
    """Grid: (tiles, num_kv_heads, num_splits). A tile has ROWS / GROUP_BLOCK tokens of one sequence
    with the GROUP query heads that read one KV head; a generation is one tile.

    With IS_SPLIT the keys of a tile are shared by the programs of axis 2, whose results go to
    ``sums`` fp32[tiles, NUM_HEADS, num_splits, HEAD_DIM] and ``stats`` fp32[.., 2].
    """
    TOKENS: tl.constexpr = ROWS // GROUP_BLOCK
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence, first_token = first_row_of(
        tile, starts_ptr, first_sequence, num_sequences, TOKENS, IS_GENERATION
    )
    start = tl.load(starts_ptr + sequence)
    num_tokens = tl.load(starts_ptr + sequence + 1) - start
    if first_token >= num_tokens:
        return
    length = tl.load(lengths_ptr + sequence)
    first_position = length - num_tokens + first_token
    begin, end = keys_of(first_position, length, window, TOKENS, KEYS, HAS_WINDOW)
    if IS_SPLIT:
        begin, end = share_of(split, begin, end, num_splits, KEYS)
        if begin >= end:
            return

    places, heads, is_member = _tile_rows(kv_head, ROWS, GROUP, GROUP_BLOCK)
    tokens = first_token + places
    is_row = (tokens < num_tokens) & is_member
    dims = tl.arange(0, HEAD_BLOCK)
    is_in = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = _row_ptrs(query_ptr, start + tokens, heads, query_stride, HEAD_DIM, HEAD_BLOCK)
    query = tl.load(query_ptrs, mask=is_in, other=0.0)
    if DOT_IN_FP32:
        query = query.to(tl.float32)
    largest, total = _sums_before_keys(sinks_ptr, heads, is_row, split, ROWS, HAS_SINKS)
    head_ptr = cache_ptr + kv_head * TOKENS_PER_BLOCK * HEAD_DIM
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    largest, total, summed = _add_span(
        (largest, total, tl.zeros([ROWS, HEAD_BLOCK], tl.float32)), query,
        first_position + places, (first_position, begin, end),
        (head_ptr, table_ptr, value_offset, block_stride), (window, scale, softcap),
        HEAD_DIM, HEAD_BLOCK, TOKENS_PER_BLOCK, KEYS, HAS_WINDOW, HAS_SOFTCAP, DOT_IN_FP32,
    )  # fmt: skip

    if IS_SPLIT:
        place = (tile.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(sums_ptr + place[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_in)
        tl.store(stats_ptr + place * 2, largest, mask=is_row)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_row)
    else:
        result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = _row_ptrs(out_ptr, start + tokens, heads, out_stride, HEAD_DIM, HEAD_BLOCK)
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_in)


@jit()
def _tile_rows(
    kv_head: tl.tensor, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr
) -> tl.tensor:
    """Of each row of a tile: which of the tile's tokens it is, its query head, and whether there is
    such a head."""
    rows = tl.arange(0, ROWS)
    members = rows % GROUP_BLOCK
    return rows // GROUP_BLOCK, kv_head * GROUP + members, members < GROUP


@jit()
def _row_ptrs(
    ptr: tl.tensor,
    row_ids: tl.tensor,
    heads: tl.tensor,
    stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> tl.tensor:
    """[ROWS, HEAD_BLOCK], of the heads of rows that lie ``stride`` numbers apart."""
    offsets = row_ids.to(tl.int64) * stride + heads * HEAD_DIM
    return ptr + offsets[:, None] + tl.arange(0, HEAD_BLOCK)[None, :]


@jit()
def _sums_before_keys(
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
def _add_span(
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
    """As ``_add_span``, of KEYS more keys; IS_MASKED: not all of them count for all rows."""
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


@jit(_VARYING)
def join_splits(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    first_sequence: tl.tensor,
    num_splits: tl.tensor,
    out_stride: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """Grid: (generations, NUM_HEADS). One row and head from what its splits have left."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = first_sequence + tile
    start = tl.load(starts_ptr + sequence)
    if tl.load(starts_ptr + sequence + 1) == start:
        return
    length = tl.load(lengths_ptr + sequence)
    begin, end = keys_of(length - 1, length, window, 1, KEYS, HAS_WINDOW)
    per_split = keys_per_split(begin, end, num_splits, KEYS)
    splits = tl.arange(0, SPLITS_BLOCK)
    # The others have left nothing, and what lies in their place is from an earlier iteration.
    is_split = (splits < num_splits) & (begin + splits * per_split < end)
    dims = tl.arange(0, HEAD_BLOCK)
    is_dim = dims < HEAD_DIM
    places = (tile.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    largest = tl.load(stats_ptr + places * 2, mask=is_split, other=float("-inf"))
    totals = tl.load(stats_ptr + places * 2 + 1, mask=is_split, other=0.0)
    sums = tl.load(
        sums_ptr + places[:, None] * HEAD_DIM + dims[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    top = tl.max(largest, axis=0)
    shares = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(totals * shares, axis=0)
    result = tl.sum(sums * shares[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + start.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_dim)
