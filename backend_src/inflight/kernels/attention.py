"""Paged attention over packed rows of contexts and generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.kernels.attention_kernels import attend_tile, join_splits
from inflight.kernels.language import is_interpreted, power_of_2, tiles
from inflight.kernels.launch import AttentionLaunches, Launch, multiprocessors

MAX_SPLITS = 64
SMALLEST_TILE = 16
"""Rows of a product of matrices at least."""


class ScoreRules(Protocol):
    """``model.attention.AttentionRules``, which says how scores become weights."""

    @property
    def scale(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None:
        """fp32[num_heads], contiguous, on the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRows:
    """The sequences of an iteration: contexts first, then generations of at most one row each.

    Tensors are int32 on the device and as ``model.runner.PackedInputs`` describes them; a CUDA
    graph keeps their addresses, so they are buffers that each iteration fills anew. The numbers are
    the host's.
    """

    cu_seqlens_q: Tensor
    """int32[S + 1]. A sequence may have no rows: nothing is computed or written for it."""
    context_lens: Tensor
    """int32[S]."""
    block_tables: Tensor
    """int32[S, B], the ids of a row side by side; read as far as ``context_lens`` says."""
    num_context_sequences: int
    num_context_tokens: int
    """Rows of contexts at most."""
    longest: int
    """No generation has more tokens in the KV cache. It only decides how work is split: a CUDA
    graph is captured with the longest there may be."""

    @property
    def num_generations(self) -> int:
        return len(self.context_lens) - self.num_context_sequences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """How the attention of one model runs on one device, and room for the splits of generations.
    Made once; ``attend`` of one iteration after another may use it, on one stream."""

    context: Launch
    generation: Launch
    wanted_programs: int
    """Generations are split until there are so many programs; a few for each multiprocessor."""
    sums: Tensor
    """float32[places, head_dim]: what splits have summed up."""
    stats: Tensor
    """float32[places, 2]: their largest score and the sum of their weights."""

    @classmethod
    def allocate(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        launches: AttentionLaunches,
        device: torch.device,
    ) -> AttentionPlan:
        """Raises RuntimeError (torch.OutOfMemoryError on a GPU) when there is no room."""
        wanted = launches.programs_per_multiprocessor * multiprocessors(device)
        places = max(wanted, num_kv_heads) // num_kv_heads * num_heads
        return cls(
            context=launches.context,
            generation=launches.generation,
            wanted_programs=wanted,
            sums=torch.empty(places, head_dim, dtype=torch.float32, device=device),
            stats=torch.empty(places, 2, dtype=torch.float32, device=device),
        )

    def num_splits(self, num_generations: int, num_kv_heads: int, longest: int) -> int:
        """How many programs share the keys of one generation and KV head."""
        room = self.wanted_programs // (num_generations * num_kv_heads)
        return max(1, min(room, MAX_SPLITS, tiles(longest, self.generation.columns)))


def attend(
    query: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    rules: ScoreRules,
    out: Tensor,
    plan: AttentionPlan,
) -> None:
    """out [T, num_heads, head_dim] = attention of query [T, num_heads, head_dim] over ``cache``,
    the layer's part of the storage (kv_layout.py), where K and V of these rows have been written.

    Query head h reads KV head h // (num_heads / num_kv_heads). Both tensors are of the dtype of the
    cache, with the numbers of a row side by side. Rows of ``out`` that belong to no sequence keep
    what they hold. Slots outside the sequences are never read into a result.
    """
    assert query.shape == out.shape and query.stride()[1:] == out.stride()[1:] == (
        query.shape[2],
        1,
    )
    assert query.dtype == cache.dtype and cache.is_contiguous() and cache.shape[4] == query.shape[2]
    if rows.num_context_sequences and rows.num_context_tokens:
        attend_contexts(query, cache, rows, rules, out, plan)
    if rows.num_generations:
        attend_generations(query, cache, rows, rules, out, plan)


def attend_contexts(
    query: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    rules: ScoreRules,
    out: Tensor,
    plan: AttentionPlan,
) -> None:
    """``attend`` for the rows of contexts, of which there are some."""
    group_block = power_of_2(query.shape[1] // cache.shape[2])
    tile_rows = max(plan.context.rows, group_block, SMALLEST_TILE)
    tokens = tile_rows // group_block
    num_tiles = rows.num_context_tokens // tokens + rows.num_context_sequences
    attend_tile[(num_tiles, cache.shape[2], 1)](
        *_tensors(query, cache, rows, rules, out, plan),
        0,
        rows.num_context_sequences,
        1,
        *_numbers(query, cache, rows, rules, out),
        **_shape(query, cache, rules),
        GROUP_BLOCK=group_block,
        ROWS=tile_rows,
        KEYS=plan.context.columns,
        IS_GENERATION=False,
        IS_SPLIT=False,
        num_warps=plan.context.num_warps,
        num_stages=plan.context.num_stages,
    )


def attend_generations(
    query: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    rules: ScoreRules,
    out: Tensor,
    plan: AttentionPlan,
) -> None:
    """``attend`` for the generations, of which there are some."""
    num_heads, num_kv_heads, head_dim = query.shape[1], cache.shape[2], query.shape[2]
    # One token is a tile: what its heads do not fill of it stays empty.
    tile_rows = max(power_of_2(num_heads // num_kv_heads), SMALLEST_TILE)
    num_splits = plan.num_splits(rows.num_generations, num_kv_heads, rows.longest)
    attend_tile[(rows.num_generations, num_kv_heads, num_splits)](
        *_tensors(query, cache, rows, rules, out, plan),
        rows.num_context_sequences,
        rows.num_generations,
        num_splits,
        *_numbers(query, cache, rows, rules, out),
        **_shape(query, cache, rules),
        GROUP_BLOCK=tile_rows,
        ROWS=tile_rows,
        KEYS=plan.generation.columns,
        IS_GENERATION=True,
        IS_SPLIT=num_splits > 1,
        num_warps=plan.generation.num_warps,
        num_stages=plan.generation.num_stages,
    )
    if num_splits > 1:
        join_splits[(rows.num_generations, num_heads)](
            out,
            plan.sums,
            plan.stats,
            rows.cu_seqlens_q,
            rows.context_lens,
            rows.num_context_sequences,
            num_splits,
            out.stride(0),
            rules.sliding_window or 0,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=power_of_2(head_dim),
            KEYS=plan.generation.columns,
            SPLITS_BLOCK=MAX_SPLITS,
            HAS_WINDOW=rules.sliding_window is not None,
            num_warps=4,
        )


def _tensors(
    query: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    rules: ScoreRules,
    out: Tensor,
    plan: AttentionPlan,
) -> tuple[Tensor, ...]:
    sinks = plan.stats if rules.sinks is None else rules.sinks  # absent: never read
    return (
        out,
        plan.sums,
        plan.stats,
        query,
        cache,
        rows.cu_seqlens_q,
        rows.context_lens,
        rows.block_tables,
        sinks,
    )


def _numbers(
    query: Tensor, cache: Tensor, rows: AttentionRows, rules: ScoreRules, out: Tensor
) -> tuple[float, ...]:
    return (
        rows.block_tables.stride(0),
        out.stride(0),
        query.stride(0),
        cache.stride(0),
        cache.stride(1),
        rules.sliding_window or 0,
        rules.scale,
        rules.softcap or 0.0,
    )


def _shape(query: Tensor, cache: Tensor, rules: ScoreRules) -> dict[str, int | bool]:
    """What the compiler knows in both phases."""
    num_heads, head_dim = query.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // cache.shape[2],
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": power_of_2(head_dim),
        "TOKENS_PER_BLOCK": cache.shape[3],
        "HAS_WINDOW": rules.sliding_window is not None,
        "HAS_SOFTCAP": rules.softcap is not None,
        "HAS_SINKS": rules.sinks is not None,
        # The interpreter's products of bf16 are garbage, and those of fp16 sum up in fp16.
        "DOT_IN_FP32": is_interpreted(attend_tile),
    }
