"""The kernels of attention.py: a tile of rows against a span of keys, and the sum over spans."""

from __future__ import annotations

from inflight.kernels.attention_softmax import add_span, sums_before_keys
from inflight.kernels.attention_spans import first_row_of, keys_of, keys_per_split, share_of
from inflight.kernels.language import jit, tl

_VARYING = (
    *("starts_ptr", "lengths_ptr", "tables_ptr"),
    *("first_sequence", "num_sequences", "num_splits", "table_stride", "window"),
)


@jit(_VARYING)
def attend_tile(
    out_ptr: tl.tensor, sums_ptr: tl.tensor, stats_ptr: tl.tensor,
    query_ptr: tl.tensor, cache_ptr: tl.tensor,
    starts_ptr: tl.tensor, lengths_ptr: tl.tensor, tables_ptr: tl.tensor, sinks_ptr: tl.tensor,
    first_sequence: tl.tensor, num_sequences: tl.tensor, num_splits: tl.tensor,
    table_stride: tl.tensor, out_stride: tl.tensor, query_stride: tl.tensor,
    value_offset: tl.tensor, block_stride: tl.tensor,
    window: tl.tensor, scale: tl.tensor, softcap: tl.tensor,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    IS_GENERATION: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: (tiles, num_kv_heads, num_splits). A tile has ROWS / GROUP_BLOCK tokens of one sequence
    with the GROUP query heads that read one KV head; a generation is one tile.

    With IS_SPLIT the keys of a tile are shared by the programs of axis 2, whose results go to
    ``sums`` fp32[tiles, NUM_HEADS, num_splits, HEAD_DIM] and ``stats`` fp32[.., 2].
    """
    TOKENS: tl.constexpr = ROWS // GROUP_BLOCK
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    is_row = (first_token + places < num_tokens) & is_member
    rows = (start + first_token + places, heads, is_row)
    query = _load_rows(query_ptr, rows, query_stride, HEAD_DIM, HEAD_BLOCK, DOT_IN_FP32)
    largest, total = sums_before_keys(sinks_ptr, heads, is_row, split, ROWS, HAS_SINKS)
    head_ptr = cache_ptr + kv_head * TOKENS_PER_BLOCK * HEAD_DIM
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    largest, total, summed = add_span(
        (largest, total, tl.zeros([ROWS, HEAD_BLOCK], tl.float32)), query,
        first_position + places, (first_position, begin, end),
        (head_ptr, table_ptr, value_offset, block_stride), (window, scale, softcap),
        HEAD_DIM, HEAD_BLOCK, TOKENS_PER_BLOCK, KEYS, HAS_WINDOW, HAS_SOFTCAP, DOT_IN_FP32,
    )  # fmt: skip
    if IS_SPLIT:
        place = (tile.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        sums = (largest, total, summed)
        _leave_sums(sums_ptr, stats_ptr, place, is_row, sums, HEAD_DIM, HEAD_BLOCK)
    else:
        result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        _store_rows(out_ptr, rows, out_stride, result, HEAD_DIM, HEAD_BLOCK)


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
def _load_rows(
    ptr: tl.tensor,
    rows: tl.tuple,
    stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    IN_FP32: tl.constexpr,
) -> tl.tensor:
    """[ROWS, HEAD_BLOCK] of ``rows`` (id, head, whether there is such), ``stride`` apart; 0 where
    there is nothing."""
    ptrs, is_in = _row_ptrs(ptr, rows, stride, HEAD_DIM, HEAD_BLOCK)
    x = tl.load(ptrs, mask=is_in, other=0.0)
    if IN_FP32:
        x = x.to(tl.float32)
    return x


@jit()
def _store_rows(
    ptr: tl.tensor,
    rows: tl.tuple,
    stride: tl.tensor,
    x: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Where ``_load_rows`` would find it, in the dtype that is there."""
    ptrs, is_in = _row_ptrs(ptr, rows, stride, HEAD_DIM, HEAD_BLOCK)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=is_in)


@jit()
def _leave_sums(
    sums_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    place: tl.tensor,
    is_row: tl.tensor,
    sums: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """For ``join_splits``, at the ``place`` of each row."""
    largest, total, summed = sums
    dims = tl.arange(0, HEAD_BLOCK)
    is_in = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(sums_ptr + place[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_in)
    tl.store(stats_ptr + place * 2, largest, mask=is_row)
    tl.store(stats_ptr + place * 2 + 1, total, mask=is_row)


@jit()
def _row_ptrs(
    ptr: tl.tensor,
    rows: tl.tuple,
    stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> tl.tensor:
    row_ids, heads, is_row = rows
    dims = tl.arange(0, HEAD_BLOCK)
    offsets = row_ids.to(tl.int64) * stride + heads * HEAD_DIM
    is_in = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return ptr + offsets[:, None] + dims[None, :], is_in


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
