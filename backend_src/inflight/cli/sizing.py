"""What ``inflight simulate`` and ``inflight plan`` begin with: model sizes, KV pool, cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.api import CapacitySchedulerPolicy, ExecutorConfig
from inflight.api.config import InflightConfig
from inflight.checkpoint.files import read_json
from inflight.cli.memory import available_memory, number_of_weights
from inflight.cli.option_groups import CostOptions, MemoryOptions
from inflight.engine.memory import KvMemory
from inflight.engine.pools import kv_pools, layer_groups
from inflight.errors import ConfigError
from inflight.executor.executor import SEQ_LEN_CEILING
from inflight.simulator.calibration_file import Calibration, load_calibration, save_calibration
from inflight.simulator.comparison import POLICIES
from inflight.simulator.cost_model import derived_cost
from inflight.simulator.example import EXAMPLE_COST
from inflight.simulator.model_shape import EMBEDDED_MODEL, ModelShape
from inflight.simulator.planner import BLOCK_SIZES
from inflight.simulator.tiers import Bandwidth, TierSpeeds

GIB = 1 << 30
_NO_FOLDER = "simulated"
_DEFAULT_HOST, _DEFAULT_DISK = Bandwidth.both(5e9), Bandwidth.both(0.5e9)
"""Of the size that two cores and a virtual disk have."""


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
    """As the server resolves them, but that a disk tier needs no folder. Raises ConfigError."""
    if config.kv_cache_disk_bytes and not config.kv_cache_disk_path:
        config = config.model_copy(update={"kv_cache_disk_path": _NO_FOLDER})
    longest = min(model.max_position_embeddings, SEQ_LEN_CEILING)
    return config.executor_config(max_seq_len=config.max_seq_len or longest)


def policies(config: InflightConfig) -> Sequence[CapacitySchedulerPolicy]:
    """To compare: the one that is configured, else those that a server may well have."""
    is_configured = "batch_scheduler_policy" in config.model_fields_set
    return (config.batch_scheduler_policy,) if is_configured else POLICIES


def block_sizes(config: InflightConfig) -> Sequence[int]:
    """To try: the one that is configured, else what the kernels take."""
    is_configured = "tokens_per_block" in config.model_fields_set
    return (config.tokens_per_block,) if is_configured else BLOCK_SIZES


def tier_speeds(options: MemoryOptions, model: ModelShape, calibration: Calibration) -> TierSpeeds:
    """What an option says, else what was measured, else the defaults. Raises ConfigError where an
    option is not positive."""
    return TierSpeeds(
        kv_bytes_per_token=model.kv_bytes_per_token,
        host=_bandwidth(options.host_bandwidth, calibration.host, _DEFAULT_HOST),
        disk=_bandwidth(options.disk_bandwidth, calibration.disk, _DEFAULT_DISK),
    )


def _bandwidth(option: float | None, measured: Bandwidth | None, default: Bandwidth) -> Bandwidth:
    return (measured or default) if option is None else Bandwidth.both(option * 1e9)


def free_after_weights(model: ModelShape, limits: ExecutorConfig, options: MemoryOptions) -> int:
    """Bytes for the KV cache and the rest, less the tier in host memory.

    Raises ConfigError where there are none.
    """
    given = options.memory_gib
    memory = available_memory() if given is None else int(given * GIB)
    if memory <= model.weight_bytes:
        raise ConfigError(
            f"--memory: {memory / GIB:.1f} GiB do not hold the weights, which need "
            f"{model.weight_bytes / GIB:.1f} GiB"
        )
    host_bytes = limits.kv_cache_config.tiers.host_memory_bytes
    free = memory - model.weight_bytes - host_bytes
    if free <= 0:
        raise ConfigError(
            f"kv_cache_host_memory_bytes: {host_bytes} bytes beside the weights leave nothing of "
            f"{memory / GIB:.1f} GiB for the KV cache itself"
        )
    return free


def pool_blocks(limits: ExecutorConfig, model: ModelShape, options: MemoryOptions) -> int:
    """Blocks of the first pool, as the engine counts them. Raises ConfigError."""
    groups = layer_groups(model, limits)
    pools, _ = kv_pools(limits, groups, KvMemory(free_after_weights(model, limits, options)))
    return pools[0].num_blocks


def calibration(
    options: CostOptions, config: InflightConfig, model: ModelShape, say: Callable[[str], None]
) -> Calibration:
    """By file, by measuring, or by derivation; else the example's, and a line that says so.

    Raises ConfigError where two ways are named or one is named by half.
    """
    derived = (options.tera_flops, options.gigabytes_per_second)
    ways = (options.cost_file, options.calibrate_file, derived if any(derived) else None)
    if sum(way is not None for way in ways) > 1:
        raise ConfigError("--cost, --calibrate, --flops with --bandwidth: only one of them")
    if options.cost_file is not None:
        return load_calibration(options.cost_file)
    if options.calibrate_file is not None:
        from inflight.cli.calibration import calibrate

        measured = calibrate(config, say)
        save_calibration(options.calibrate_file, measured)
        return measured
    flops, bandwidth = derived
    if flops is not None and bandwidth is not None:
        cost = derived_cost(
            model,
            flops_per_second=flops * 1e12,
            bytes_per_second=bandwidth * 1e9,
            base_seconds=options.base_ms / 1000,
        )
        return Calibration(cost)
    if any(derived):
        raise ConfigError("--flops and --bandwidth: both are needed")
    say(
        "times are those of the built-in example; --calibrate, --cost, or --flops with "
        "--bandwidth give your own"
    )
    return Calibration(EXAMPLE_COST)
