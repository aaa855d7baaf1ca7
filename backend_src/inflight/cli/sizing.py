"""What ``inflight simulate`` and ``inflight plan`` begin with: model sizes, KV pool, cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inflight.api import ExecutorConfig
from inflight.api.config import InflightConfig
from inflight.checkpoint.files import read_json
from inflight.cli.memory import available_memory, number_of_weights
from inflight.engine.pools import kv_pools, layer_groups
from inflight.errors import ConfigError
from inflight.executor.executor import SEQ_LEN_CEILING
from inflight.simulator.cost_model import CostModel, derived_cost, load_cost, save_cost
from inflight.simulator.example import EXAMPLE_COST
from inflight.simulator.model_shape import EMBEDDED_MODEL, ModelShape

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Where the cost model comes from; at most one of the three ways."""

    cost_file: Path | None = None
    calibrate_file: Path | None = None
    """Written, after the engine was measured."""
    tera_flops: float | None = None
    gigabytes_per_second: float | None = None
    base_ms: float = 0.0


def model_shape(config: InflightConfig) -> ModelShape:
    """Of ``model_dir``: a checkpoint folder, a config.json, or "" for the embedded model.

    The weights of a folder are counted, those of a config.json estimated. Raises ConfigError.
    """
    dtypes = {"dtype": config.dtype, "kv_cache_dtype": config.kv_cache_dtype}
    if not config.model_dir:
        return ModelShape.of(EMBEDDED_MODEL, **dtypes)
    path = Path(config.model_dir).expanduser()
    if path.is_file() and path.suffix != ".json":
        raise ConfigError(f"model_dir: {path}: give a checkpoint folder or its config.json")
    file = path if path.is_file() else path / "config.json"
    shape = ModelShape.of(read_json(file), **dtypes)
    counted = number_of_weights(path) if path.is_dir() else 0
    return shape.with_weights(counted) if counted else shape


def executor_limits(config: InflightConfig, model: ModelShape) -> ExecutorConfig:
    """As the server resolves them. Raises ConfigError."""
    longest = min(model.max_position_embeddings, SEQ_LEN_CEILING)
    return config.executor_config(max_seq_len=config.max_seq_len or longest)


def free_after_weights(model: ModelShape, memory_gib: float | None) -> int:
    """Bytes for the KV cache and the rest. ``memory_gib``: None = what this machine has free.

    Raises ConfigError where the weights alone do not fit.
    """
    memory = available_memory() if memory_gib is None else int(memory_gib * GIB)
    if memory <= model.weight_bytes:
        raise ConfigError(
            f"--memory: {memory / GIB:.1f} GiB do not hold the weights, which need "
            f"{model.weight_bytes / GIB:.1f} GiB"
        )
    return memory - model.weight_bytes


def pool_blocks(limits: ExecutorConfig, model: ModelShape, memory_gib: float | None) -> int:
    """Blocks of the first pool, as the engine counts them. Raises ConfigError."""
    groups = layer_groups(model, limits)
    pools, _ = kv_pools(limits, groups, free_bytes=free_after_weights(model, memory_gib))
    return pools[0].num_blocks


def cost_model(
    options: CostOptions, config: InflightConfig, model: ModelShape, say: Callable[[str], None]
) -> CostModel:
    """By file, by measuring, or by derivation; else the example's, and a line that says so.

    Raises ConfigError where two ways are named or one is named by half.
    """
    derived = (options.tera_flops, options.gigabytes_per_second)
    ways = (options.cost_file, options.calibrate_file, derived if any(derived) else None)
    if sum(way is not None for way in ways) > 1:
        raise ConfigError("--cost, --calibrate, --flops with --bandwidth: only one of them")
    if options.cost_file is not None:
        return load_cost(options.cost_file)
    if options.calibrate_file is not None:
        from inflight.cli.calibration import calibrate

        measured = calibrate(config, say)
        save_cost(options.calibrate_file, measured)
        return measured
    flops, bandwidth = derived
    if flops is not None and bandwidth is not None:
        return derived_cost(
            model,
            flops_per_second=flops * 1e12,
            bytes_per_second=bandwidth * 1e9,
            base_seconds=options.base_ms / 1000,
        )
    if any(derived):
        raise ConfigError("--flops and --bandwidth: both are needed")
    say(
        "times are those of the built-in example; --calibrate, --cost, or --flops with "
        "--bandwidth give your own"
    )
    return EXAMPLE_COST
