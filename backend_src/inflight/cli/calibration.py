"""Measures what an iteration of the real engine takes on this machine, as a cost model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from inflight.api import ExecutorConfig, KvCacheConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.api.kv_pools import KvPool
from inflight.checkpoint import prepare_checkpoint
from inflight.cli.build import with_max_seq_len
from inflight.cli.tier_calibration import measure_disk_tier, measure_host_tier
from inflight.engine.engine import Engine
from inflight.errors import ConfigError
from inflight.executor.forward_thread import ForwardThread
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelRunner,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)
from inflight.scheduler.iteration_cost import IterationCost, IterationShape, context_pairs
from inflight.simulator.calibration_file import Calibration
from inflight.simulator.cost_model import CostModel

_ROWS = (1, 2, 4, 8, 16, 32)
_SHORT_PROMPT, _SHORT_OUTPUT = 32, 6
_LONG = ((1, 1024, 13), (16, 384, 13))
"""(requests, prompt, output): attention over long contexts, and generations with much KV."""

_LEAST_SEQ_LEN = 32

_REPEATS = 3
"""Of each load; of an iteration's times the middle one counts."""

_PROBE = 1e6
"""A count large enough to read a coefficient off the fitted sum."""


class MeasuredRunner:
    """A ModelRunner that passes everything on and remembers the shape of the last forward."""

    def __init__(self, runner: ModelRunner, *, one_pool: bool) -> None:
        """``one_pool``: all layers are to share one KV pool, as with tiers."""
        self._runner = runner
        self._one_pool = one_pool
        self._shape: IterationShape | None = None

    def take_shape(self) -> IterationShape | None:
        """Of the forward since the last call; None: there was none."""
        shape, self._shape = self._shape, None
        return shape

    @property
    def spec(self) -> ModelSpec:
        spec = self._runner.spec
        return replace(spec, layer_groups=()) if self._one_pool else spec

    def memory_usage(self) -> MemoryUsage:
        return self._runner.memory_usage()

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        self._runner.allocate_kv_cache(num_blocks, tokens_per_block, further_pools)

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        self._shape = shape_of(inputs)
        return self._runner.forward(inputs, launched)

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        self._runner.copy_blocks(source_ids, target_ids, pool)

    @property
    def kv_block_format(self) -> str:
        return self._runner.kv_block_format

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        return self._runner.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self._runner.write_blocks(block_ids, contents)


def shape_of(inputs: PackedInputs) -> IterationShape:
    """What ``IterationShape.of`` says of the plan that was packed."""
    num_contexts = inputs.num_context_sequences
    rows = np.diff(inputs.cu_seqlens_q)[:num_contexts].tolist()
    ends = inputs.context_lens.tolist()
    pairs = sum(context_pairs(end - count, count) for count, end in zip(rows, ends, strict=False))
    generations = ends[num_contexts:]
    return IterationShape(inputs.num_context_tokens, pairs, len(generations), sum(generations))


def calibrate(config: InflightConfig, say: Callable[[str], None]) -> Calibration:
    """Loads the checkpoint as a server with ``config`` would, computes for some seconds, and moves
    KV through the tiers that are configured.

    Raises CheckpointError, ConfigError: a disk tier needs its folder here.
    """
    set_thread_defaults()
    checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
    config = with_max_seq_len(config, checkpoint)
    from inflight.model.factory import load_runner  # torch: seconds

    runner = load_runner(checkpoint.directory, config)
    say(f"measuring {checkpoint.name} on this machine, which should do nothing else")
    measured = measure(runner, config.executor_config(max_seq_len=config.max_seq_len))
    for name, bandwidth in (("host memory", measured.host), ("disk", measured.disk)):
        if bandwidth is not None:
            down, up = (speed / 1e9 for speed in bandwidth)
            say(f"KV tier {name}: {down:.2f} GB/s into it, {up:.2f} GB/s back")
    return measured


def measure(runner: ModelRunner, limits: ExecutorConfig) -> Calibration:
    """``runner`` is loaded and has no KV cache yet; its forwards run on a thread, as a server's do.
    Raises ConfigError where there is no room."""
    tiers = limits.kv_cache_config.tiers
    loads = _loads(limits)
    tokens_per_block = limits.kv_cache_config.tokens_per_block
    blocks = max(
        count * (1 + (prompt + output) // tokens_per_block) for count, prompt, output in loads
    )
    measured = MeasuredRunner(runner, one_pool=tiers.exist)
    kv_config = KvCacheConfig(
        tokens_per_block=tokens_per_block, num_blocks=blocks + 1, enable_block_reuse=False
    )
    config = ExecutorConfig(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        kv_cache_config=kv_config,
    )
    rng = random.Random(0)
    cost = IterationCost()
    with ForwardThread() as lane:
        engine = Engine(measured, config, lane=lane)
        _compute(engine, measured, loads[0], rng)  # first touches of memory and code
        for load in loads:
            repeats = [_compute(engine, measured, load, rng) for _ in range(_REPEATS)]
            for same in zip(*repeats, strict=True):
                shape, _ = same[0]
                cost.observe(shape, median(seconds for _, seconds in same))
    host = measure_host_tier(runner, blocks) if tiers.host_memory_bytes else None
    disk = None
    if tiers.disk_bytes:
        disk = measure_disk_tier(runner, blocks, Path(tiers.disk_path))
    return Calibration(_coefficients(cost), host, disk)


def _loads(limits: ExecutorConfig) -> list[tuple[int, int, int]]:
    """(requests at once, prompt tokens, output tokens), within the limits."""
    room = limits.max_seq_len
    if room < _LEAST_SEQ_LEN:
        raise ConfigError(f"max_seq_len: {room}: to measure, {_LEAST_SEQ_LEN} are needed")
    short = max(1, min(_SHORT_PROMPT, room - _SHORT_OUTPUT))
    loads = [(rows, short, _SHORT_OUTPUT) for rows in _ROWS]
    loads += [(rows, max(1, min(prompt, room - output)), output) for rows, prompt, output in _LONG]
    return [(min(rows, limits.max_batch_size), prompt, output) for rows, prompt, output in loads]


def _compute(
    engine: Engine, measured: MeasuredRunner, load: Sequence[int], rng: random.Random
) -> list[tuple[IterationShape, float]]:
    """The shape and the seconds of each iteration."""
    count, prompt, output = load
    vocab_size = measured.spec.vocab_size
    for _ in range(count):
        ids = tuple(rng.randrange(vocab_size) for _ in range(prompt))
        request = Request(input_token_ids=ids, max_tokens=output, end_ids=())
        engine.enqueue(engine.next_id(), request)
    seen = []
    while engine.loop.has_work:
        began = time.perf_counter()
        engine.loop.step()
        seconds = time.perf_counter() - began
        engine.outbox.take(None, 0)
        shape = measured.take_shape()
        if shape is not None:
            seen.append((shape, seconds))
    return seen


def _coefficients(cost: IterationCost) -> CostModel:
    base = cost.seconds(IterationShape(0, 0, 0, 0))

    def coefficient(place: int) -> float:
        probe = [0, 0, 0, 0]
        probe[place] = int(_PROBE)
        return max(0.0, (cost.seconds(IterationShape(*probe)) - base) / _PROBE)

    return CostModel(
        base_seconds=base,
        context_token_seconds=coefficient(0),
        context_pair_seconds=coefficient(1),
        generation_row_seconds=coefficient(2),
        generation_pair_seconds=coefficient(3),
    )
