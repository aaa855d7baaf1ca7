"""Which launches of attention are fastest on this card: measured once, kept in a file.

``tune`` runs at build or at warm-up. A request never waits for it: ``launches_for`` only reads, and
what was never measured runs with the defaults.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigError, one_line
from inflight.kernels.attention import AttentionPlan, AttentionRows, attend
from inflight.kernels.kv_layout import KvShape
from inflight.kernels.language import tiles, triton
from inflight.kernels.launch import AttentionLaunches, Launch, default_launches
from inflight.kernels.measurements import read_entries, store_entry

_LOG = logging.getLogger(__name__)

Measure = Callable[[Callable[[], None]], float]
"""Runs what it is given some times; returns how long one run takes."""

CONTEXT_CANDIDATES = (
    Launch(rows=64, columns=64, num_warps=4, num_stages=2),
    Launch(rows=64, columns=64, num_warps=4, num_stages=3),
    Launch(rows=128, columns=32, num_warps=8, num_stages=3),
    Launch(rows=128, columns=64, num_warps=4, num_stages=2),
    Launch(rows=128, columns=64, num_warps=8, num_stages=3),
    Launch(rows=128, columns=64, num_warps=8, num_stages=4),
    Launch(rows=128, columns=128, num_warps=8, num_stages=2),
)
GENERATION_CANDIDATES = (
    Launch(rows=16, columns=32, num_warps=2, num_stages=3),
    Launch(rows=16, columns=32, num_warps=4, num_stages=4),
    Launch(rows=16, columns=64, num_warps=2, num_stages=3),
    Launch(rows=16, columns=64, num_warps=4, num_stages=3),
    Launch(rows=16, columns=64, num_warps=4, num_stages=4),
    Launch(rows=16, columns=128, num_warps=4, num_stages=2),
    Launch(rows=16, columns=128, num_warps=8, num_stages=3),
)
PROGRAMS_CANDIDATES = (2, 8)
"""Of a multiprocessor; beside the default."""

_SOURCES = (
    "attention.py",
    "attention_kernels.py",
    "attention_softmax.py",
    "attention_spans.py",
    "functions.py",
    "language.py",
)
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What decides how attention is best cut, beside the card."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: torch.dtype

    @property
    def words(self) -> str:
        return (
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, blocks of "
            f"{self.tokens_per_block}, {_NAMES[self.dtype]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Equal sequences to measure with."""

    sequences: int
    rows: int
    length: int


CONTEXT_LOADS = (
    Load(sequences=1, rows=2048, length=2048),
    Load(sequences=4, rows=256, length=1024),
)
GENERATION_LOADS = (
    Load(sequences=1, rows=1, length=4096),
    Load(sequences=16, rows=1, length=2048),
    Load(sequences=64, rows=1, length=1024),
)


def launches_for(
    file: Path | None, shape: AttentionShape, device: torch.device
) -> AttentionLaunches:
    """Those measured earlier for these kernels, card, version of Triton and shape, else the
    defaults. A file that is missing or cannot be read has measured nothing."""
    entry = None if file is None else read_entries(file).get(key(shape, device))
    found = None if entry is None else _launches(entry)
    return default_launches(shape.head_dim, shape.dtype) if found is None else found


def is_measured(file: Path, shape: AttentionShape, device: torch.device) -> bool:
    """Whether ``launches_for`` finds something."""
    return _launches(read_entries(file).get(key(shape, device))) is not None


def tune(
    file: Path,
    shape: AttentionShape,
    device: torch.device,
    *,
    measure: Measure | None = None,
    loads: tuple[Iterable[Load], Iterable[Load]] = (CONTEXT_LOADS, GENERATION_LOADS),
) -> AttentionLaunches:
    """Measures the candidates on ``loads`` (contexts, generations) and writes the fastest to
    ``file``, beside what is there of other shapes. Takes seconds, most of them to compile, and
    memory for the largest load. ``measure``: None for the card's own clock. Raises OSError when
    the file cannot be written, ConfigError when nothing runs on this card, torch.OutOfMemoryError
    when there is no room for the loads.
    """
    context_loads, generation_loads = loads
    tuner = _Tuner(shape, device, triton.testing.do_bench if measure is None else measure)
    best = default_launches(shape.head_dim, shape.dtype)
    contexts = (replace(best, context=launch) for launch in CONTEXT_CANDIDATES)
    best = tuner.fastest(best, contexts, context_loads)
    generations = (replace(best, generation=launch) for launch in GENERATION_CANDIDATES)
    best = tuner.fastest(best, generations, generation_loads)
    splits = (replace(best, programs_per_multiprocessor=n) for n in PROGRAMS_CANDIDATES)
    best = tuner.fastest(best, splits, generation_loads)
    store_entry(file, key(shape, device), asdict(best))
    return best


@dataclass(frozen=True, slots=True)
class _Rules:
    """``ScoreRules``: none of the optional ones changes which tiles are best."""

    scale: float
    sliding_window: None = None
    softcap: None = None
    sinks: None = None


class _Tuner:
    def __init__(self, shape: AttentionShape, device: torch.device, measure: Measure) -> None:
        self._shape = shape
        self._device = device
        self._measure = measure

    def fastest(
        self,
        first: AttentionLaunches,
        others: Iterable[AttentionLaunches],
        loads: Iterable[Load],
    ) -> AttentionLaunches:
        """The candidate with the smallest sum of times, each in those of the load's fastest; the
        first of equal ones. Raises ConfigError when none runs."""
        candidates = (first, *others)
        scores = [0.0] * len(candidates)
        for load in loads:
            times = self._times(candidates, load)
            least = min(times)
            if least == math.inf:
                raise ConfigError("attention_backend: no tile of the kernels runs on this card")
            scores = [score + time / least for score, time in zip(scores, times, strict=True)]
        return candidates[scores.index(min(scores))]

    def _times(self, candidates: Iterable[AttentionLaunches], load: Load) -> list[float]:
        shape, device = self._shape, self._device
        tensors, rules = make_load(load, shape, device), _Rules(shape.head_dim**-0.5)
        query, cache, rows, out = tensors.query, tensors.cache, tensors.rows, tensors.out

        def time(launches: AttentionLaunches) -> float:
            plan = AttentionPlan.allocate(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                launches=launches,
                device=device,
            )
            try:
                return self._measure(lambda: attend(query, cache, rows, rules, out, plan))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # Most often OutOfResources: its tiles do not fit into this card's shared memory. A
                # compiler may stumble over one of them as well.
                _LOG.debug("passed over: %s: %s", launches, one_line(error))
                return math.inf

        return [time(launches) for launches in candidates]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadTensors:
    """What ``attend`` takes for a load; ``query`` and ``cache`` are random."""

    query: Tensor
    cache: Tensor
    rows: AttentionRows
    out: Tensor


def make_load(load: Load, shape: AttentionShape, device: torch.device) -> LoadTensors:
    """Raises RuntimeError (torch.OutOfMemoryError on a GPU) when there is no room."""
    blocks = tiles(load.length, shape.tokens_per_block)
    layout = KvShape(
        num_layers=1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    storage = layout.allocate(load.sequences * blocks, shape.tokens_per_block, device)
    storage.normal_()
    size = (load.sequences * load.rows, shape.num_heads, shape.head_dim)
    query = torch.randn(size, device=device).to(shape.dtype)
    return LoadTensors(
        query=query, cache=storage[0], rows=_rows(load, blocks, device), out=query.clone()
    )


def _rows(load: Load, blocks: int, device: torch.device) -> AttentionRows:
    """Each sequence with blocks of its own, scattered."""
    starts = torch.arange(load.sequences + 1, dtype=torch.int32) * load.rows
    tables = torch.randperm(load.sequences * blocks).int().view(load.sequences, blocks)
    is_context = load.rows > 1
    return AttentionRows(
        cu_seqlens_q=starts.to(device),
        context_lens=torch.full((load.sequences,), load.length).int().to(device),
        block_tables=tables.to(device),
        num_context_sequences=load.sequences if is_context else 0,
        num_context_tokens=load.sequences * load.rows if is_context else 0,
        longest=load.length,
    )


def key(shape: AttentionShape, device: torch.device) -> str:
    """Changes with everything that makes old measurements worthless."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{digest.hexdigest()[:16]}, triton {triton.__version__}, {card}: {shape.words}"


def _launches(entry: Any) -> AttentionLaunches | None:
    """None for what ``tune`` would not have written."""
    try:
        found = AttentionLaunches(
            context=Launch(**entry["context"]),
            generation=Launch(**entry["generation"]),
            programs_per_multiprocessor=entry["programs_per_multiprocessor"],
        )
    except (KeyError, TypeError):
        return None
    tile_sizes = (found.context.rows, found.context.columns, found.generation.columns)
    others = (
        found.context.num_warps,
        found.generation.num_warps,
        found.context.num_stages,
        found.generation.num_stages,
        found.programs_per_multiprocessor,
    )
    is_sane = all(n in (16, 32, 64, 128, 256) for n in tile_sizes) and all(
        n in range(1, 17) for n in others
    )
    return found if is_sane else None
