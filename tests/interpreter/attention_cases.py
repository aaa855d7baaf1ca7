"""Paged attention against a softmax written row by row in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from inflight.kernels.attention import AttentionPlan, AttentionRows, attend
from inflight.kernels.kv_layout import KvShape
from inflight.kernels.launch import AttentionLaunches, Launch
from tests.interpreter.case import DTYPES, Case, excess, poisoned, random, rounding, seeded

GARBAGE_BLOCK = 1 << 30
UNTOUCHED = 123.0

MIXED = ((5, 5), (9, 21), (2, 13), (1, 1), (1, 16), (1, 17), (1, 40))
"""(rows, tokens with them) of each sequence; contexts have several rows here."""
CONTEXTS = ((1, 1), (17, 17), (3, 70))
GENERATIONS = ((1, 1), (1, 33), (1, 130))
ONE_LONG = ((1, 300),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """``attention.ScoreRules``."""

    scale: float = 0.2
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    sequences: tuple[tuple[int, int], ...] = MIXED
    num_contexts: int = 3
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    tokens_per_block: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    programs: int = 1
    """Wanted; the fewer generations there are, the more splits come from it."""
    keys: int = 16
    """Of a tile."""
    tile_rows: int = 16
    idle: int = 0
    """Generations without rows, as a CUDA graph is padded with."""

    @property
    def sizes(self) -> dict[str, int]:
        num_heads, num_kv_heads = self.heads
        return {
            "head size": self.head_dim,
            "block": self.tokens_per_block,
            "query heads of a KV head": num_heads // num_kv_heads,
        }

    @property
    def words(self) -> str:
        num_generations = len(self.sequences) - self.num_contexts
        parts = [
            f"{self.num_contexts} contexts + {num_generations} generations",
            f"{self.heads[0]}/{self.heads[1]} heads of {self.head_dim}",
            f"blocks of {self.tokens_per_block}",
            f"tiles {self.tile_rows} x {self.keys}",
        ]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"soft-cap {self.softcap:g}"] if self.softcap is not None else []
        parts += ["sinks"] if self.has_sinks else []
        parts += [f"split for {self.programs} programs"] if self.programs > 1 else []
        parts += [f"{self.idle} idle"] if self.idle else []
        return ", ".join(parts)


PLAIN = AttentionShape()
ALL_RULES = AttentionShape(window=11, softcap=3.0, has_sinks=True)
SHAPES = (
    PLAIN,
    # Head sizes that fill a power of two, and others.
    replace(PLAIN, head_dim=16),
    replace(PLAIN, head_dim=80, tokens_per_block=32),
    replace(PLAIN, head_dim=96, tokens_per_block=64, keys=32),
    replace(PLAIN, head_dim=128, tokens_per_block=128, keys=64, tile_rows=64),
    replace(PLAIN, head_dim=256, heads=(2, 1)),
    # Query heads of one KV head: one, three, eight, more than a tile has rows.
    replace(PLAIN, heads=(3, 3)),
    replace(PLAIN, heads=(9, 3)),
    replace(PLAIN, heads=(8, 1), tile_rows=32),
    replace(PLAIN, heads=(20, 1)),
    # Each rule alone, and all.
    replace(PLAIN, window=4),
    replace(PLAIN, window=1),
    replace(PLAIN, softcap=2.0),
    replace(PLAIN, has_sinks=True),
    ALL_RULES,
    # One phase alone.
    replace(PLAIN, sequences=CONTEXTS, num_contexts=3, tile_rows=32),
    replace(PLAIN, sequences=GENERATIONS, num_contexts=0, keys=32),
    # Split generations: even and uneven spans, empty splits, windows that begin inside.
    replace(PLAIN, sequences=GENERATIONS, num_contexts=0, programs=32),
    replace(ALL_RULES, sequences=GENERATIONS, num_contexts=0, programs=24, window=90),
    replace(PLAIN, sequences=ONE_LONG, num_contexts=0, heads=(9, 3), programs=12),
    replace(PLAIN, sequences=ONE_LONG, num_contexts=0, heads=(2, 1), programs=64, window=33),
    replace(PLAIN, sequences=ONE_LONG, num_contexts=0, head_dim=80, programs=9, has_sinks=True),
    replace(PLAIN, sequences=ONE_LONG, num_contexts=0, heads=(20, 1), programs=5, softcap=1.5),
    replace(ALL_RULES, programs=40, tokens_per_block=32),
    # Rows and sequences that are not there.
    replace(PLAIN, idle=2),
    replace(PLAIN, sequences=GENERATIONS, num_contexts=0, programs=32, idle=2),
)


def attention_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in SHAPES:
            run = partial(run_attention, dtype, shape)
            yield Case(kernel="attend", dtype=dtype, shape=shape.words, sizes=shape.sizes, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Sequences with all of their K and V, in the dtype of the storage."""

    rows: AttentionRows
    rules: Rules
    query: Tensor
    keys: list[Tensor]
    """[tokens, num_kv_heads, head_dim] of each sequence."""
    values: list[Tensor]
    cache: Tensor
    """Of them, in random blocks; all other slots are NaN."""


def make_iteration(dtype: torch.dtype, shape: AttentionShape, device: torch.device) -> Iteration:
    generator = seeded(shape.head_dim + len(shape.sequences))
    num_heads, num_kv_heads = shape.heads
    lengths = [length for _, length in shape.sequences]
    keys, values = (
        [random(generator, n, num_kv_heads, shape.head_dim).to(device, dtype) for n in lengths]
        for _ in range(2)
    )
    num_rows = sum(rows for rows, _ in shape.sequences)
    query = (random(generator, num_rows, num_heads, shape.head_dim) * 2).to(device, dtype)
    sinks = random(generator, num_heads).to(device) if shape.has_sinks else None
    tables, num_blocks = _tables(shape, generator)
    layout = KvShape(num_layers=2, num_kv_heads=num_kv_heads, head_dim=shape.head_dim, dtype=dtype)
    cache = layout.allocate(num_blocks, shape.tokens_per_block, device)[1].fill_(torch.nan)
    for i, length in enumerate(lengths):
        for position in range(length):
            block, offset = divmod(position, shape.tokens_per_block)
            cache[0, tables[i, block], :, offset] = keys[i][position]
            cache[1, tables[i, block], :, offset] = values[i][position]
    return Iteration(
        rows=_rows(shape, tables, device),
        rules=Rules(sliding_window=shape.window, softcap=shape.softcap, sinks=sinks),
        query=query,
        keys=keys,
        values=values,
        cache=cache,
    )


def _tables(shape: AttentionShape, generator: torch.Generator) -> tuple[Tensor, int]:
    """int32[S, B], in random order, and how many blocks there are in all."""
    counts = [-(-length // shape.tokens_per_block) for _, length in shape.sequences]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(counts) + shape.idle, max(counts) + 1), GARBAGE_BLOCK).int()
    first = 0
    for i, count in enumerate(counts):
        tables[i, :count] = ids[first : first + count]
        first += count
    return tables, num_blocks


def _rows(shape: AttentionShape, tables: Tensor, device: torch.device) -> AttentionRows:
    counts = torch.tensor([rows for rows, _ in shape.sequences] + [0] * shape.idle)
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    lengths = torch.tensor([n for _, n in shape.sequences] + [GARBAGE_BLOCK] * shape.idle)
    num_tokens = int(counts[: shape.num_contexts].sum())
    return AttentionRows(
        cu_seqlens_q=starts.to(device),
        context_lens=lengths.int().to(device),
        block_tables=tables.to(device),
        num_context_sequences=shape.num_contexts,
        num_context_tokens=num_tokens + 40 * bool(shape.idle),  # a bound, no count
        longest=max(length for _, length in shape.sequences),
    )


def launches(shape: AttentionShape) -> AttentionLaunches:
    return AttentionLaunches(
        context=Launch(rows=shape.tile_rows, columns=shape.keys, num_warps=4, num_stages=2),
        generation=Launch(rows=16, columns=shape.keys, num_warps=4, num_stages=2),
    )


def run_attention(dtype: torch.dtype, shape: AttentionShape, device: torch.device) -> float:
    iteration = make_iteration(dtype, shape, device)
    plan = AttentionPlan.allocate(
        num_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.head_dim,
        launches=launches(shape),
        device=device,
    )
    places = shape.programs // shape.heads[1] * shape.heads[0] + shape.heads[0]
    plan = replace(
        plan,
        wanted_programs=shape.programs,
        sums=poisoned(places, shape.head_dim, dtype=torch.float32, device=device),
        stats=poisoned(places, 2, dtype=torch.float32, device=device),
    )
    num_rows = len(iteration.query)
    buffer = poisoned(num_rows + 2, *iteration.query.shape[1:], dtype=dtype, device=device)
    buffer[num_rows:] = UNTOUCHED
    beyond_rows = poisoned(2, *iteration.query.shape[1:], dtype=dtype, device=device)
    query = torch.cat((iteration.query, beyond_rows))
    attend(query, iteration.cache, iteration.rows, iteration.rules, buffer, plan)
    beyond = 0.0 if bool((buffer[num_rows:] == UNTOUCHED).all()) else torch.inf
    # Compiled, weights are rounded to the dtype before they meet the values.
    tolerance = (2 if device.type == "cpu" else 6) * rounding(dtype, device)
    return max(excess(buffer[:num_rows], expected(iteration, shape), tolerance), beyond)


def expected(iteration: Iteration, shape: AttentionShape) -> Tensor:
    """float64[T, num_heads, head_dim]."""
    results: list[Tensor] = []
    for (rows, length), keys, values in zip(
        shape.sequences, iteration.keys, iteration.values, strict=True
    ):
        for position in range(length - rows, length):
            query = iteration.query[len(results)].double()
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            seen = slice(first, position + 1)
            results.append(_attended(query, keys[seen], values[seen], iteration.rules))
    return torch.stack(results)


def _attended(query: Tensor, keys: Tensor, values: Tensor, rules: Rules) -> Tensor:
    group = query.shape[0] // keys.shape[1]
    keys, values = (heads.double().repeat_interleave(group, dim=1) for heads in (keys, values))
    scores = torch.einsum("hd,khd->hk", query, keys) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.sinks is not None:
        scores = torch.cat((scores, rules.sinks.double()[:, None]), dim=1)
    weights = scores.softmax(dim=1)[:, : len(keys)]
    return torch.einsum("hk,khd->hd", weights, values)
