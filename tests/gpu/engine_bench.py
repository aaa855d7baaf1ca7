"""Scale and Bench: what is measured of the engine, how much of it, and an engine to measure."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from inflight import Executor
from inflight.api import SamplingConfig
from inflight.api.config import InflightConfig
from inflight.model.device.load import make_device_runner, make_runtime
from inflight.model.device.runner import DeviceRunner
from inflight.model.fused.decoder_tensors import DecoderTensors
from tests.gpu.engine_shapes import (
    EXPERT_SHAPES,
    SHAPES,
    TINY_EXPERT_SHAPES,
    TINY_SHAPES,
    Ceilings,
    RandomTensors,
    Work,
    spec_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    shapes: dict[str, Mapping[str, Any]]
    expert_shapes: dict[str, Mapping[str, Any]]
    """Of which less is measured, after everything else."""
    targets: Mapping[int, float | None]
    """Of the roofline, by batch size."""
    variant_batches: tuple[int, ...]
    """Measured in other configurations as well."""
    eager_batch: int
    prompt_length: int
    num_tokens: int
    context_length: int
    context_target: float | None
    max_num_tokens: int
    max_seq_len: int
    dtype: str


CARD = Scale(
    shapes=SHAPES,
    expert_shapes=EXPERT_SHAPES,
    targets={1: 0.8, 8: None, 64: 0.7, 256: None},
    variant_batches=(1, 8, 64),
    eager_batch=32,
    prompt_length=128,
    num_tokens=96,
    context_length=2048,
    context_target=0.6,
    max_num_tokens=8192,
    max_seq_len=4096,
    dtype="bf16",
)
SMALL = Scale(
    shapes=TINY_SHAPES,
    expert_shapes=TINY_EXPERT_SHAPES,
    targets={1: None, 4: None},
    variant_batches=(4,),
    eager_batch=4,
    prompt_length=8,
    num_tokens=12,
    context_length=48,
    context_target=None,
    max_num_tokens=64,
    max_seq_len=96,
    dtype="fp32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One model on one machine."""

    name: str
    shape: Mapping[str, Any]
    scale: Scale
    device: torch.device
    ceilings: Ceilings

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.scale.dtype]

    @property
    def work(self) -> Work:
        return Work.of(spec_of(self.shape), self.dtype)

    def config(self, **keys: Any) -> InflightConfig:
        values = {
            "dtype": self.scale.dtype,
            "max_batch_size": max(self.scale.targets),
            "max_num_tokens": self.scale.max_num_tokens,
            "max_seq_len": self.scale.max_seq_len,
            "kv_cache_free_gpu_mem_fraction": 0.5,
        }
        return InflightConfig.model_validate(values | keys)

    def runner(self, config: InflightConfig) -> DeviceRunner:
        spec = spec_of(self.shape)
        tensors = DecoderTensors(RandomTensors(self.device, self.dtype), spec)
        return make_device_runner(spec, tensors, config, make_runtime(self.device))

    @contextmanager
    def engine(self, **keys: Any) -> Iterator[Executor]:
        config = self.config(**keys)
        executor = Executor(
            self.runner(config), config.executor_config(max_seq_len=config.max_seq_len)
        )
        try:
            yield executor
        finally:
            executor.shutdown()

    def prompts(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        """No two begin alike."""
        rng = np.random.default_rng(seed)
        size = (count, length)
        return [row.tolist() for row in rng.integers(3, int(self.shape["vocab_size"]), size=size)]


def free_memory(device: torch.device) -> None:
    """Of what nobody names any more: engines, models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def generation_rate(
    executor: Executor,
    prompts: list[list[int]],
    num_tokens: int,
    sampling_config: SamplingConfig | None = None,
) -> float:
    """Tokens per second of iterations in which all prompts generate."""
    executor.get_latest_iteration_stats()
    executor.generate(prompts, max_tokens=num_tokens, end_ids=(), sampling_config=sampling_config)
    gaps = [
        stats.token_gap_seconds
        for stats in executor.get_latest_iteration_stats()
        if stats.num_generated_tokens == len(prompts)
        and stats.inflight_batching_stats.num_context_requests == 0
        and stats.token_gap_seconds > 0
    ]
    if len(gaps) < 5:
        raise RuntimeError(f"only {len(gaps)} iterations had all {len(prompts)} requests")
    return len(prompts) / median(gaps)
