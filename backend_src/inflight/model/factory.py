"""load_runner: from a checkpoint folder and the configuration to the runner that serves it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inflight.api.config import InflightConfig
from inflight.engine_files.key import engine_key
from inflight.engine_files.store import EngineStore
from inflight.errors import CheckpointError, ConfigError
from inflight.model.attention import AttentionBackend
from inflight.model.choice import dtype_on_cpu, why_not_in_torch, why_not_native
from inflight.model.dtypes import (
    FP8,
    QUANTIZED_KINDS,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
)
from inflight.model.fused.assemble import make_runner
from inflight.model.fused.built import find_engine, note_limits, prove, prove_kv_storage
from inflight.model.fused.runner import FusedRunner
from inflight.model.native_attention import NativeAttentionBackend, unsupported_layers
from inflight.model.runner import ModelRunner
from inflight.model.torch_attention import TorchAttention
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.cpu import usable_cores
from inflight.native.kv_storage import KV_KINDS
from inflight.native.library import NativeLibrary, load_native

if TYPE_CHECKING:
    from inflight.model.device.runtime import DeviceRuntime
    from inflight.model.hf_runner import HfRunner
    from inflight.model.packed_model import PackedModel

# transformers takes seconds to import and a built engine does not need it: what does is imported
# where it is called.

_LOG = logging.getLogger(__name__)


def load_runner(
    checkpoint_directory: Path,
    config: InflightConfig,
    *,
    progress: Callable[[str, float], None] | None = None,
) -> ModelRunner:
    """Loads the weights and sets the number of compute threads. The runner has no KV cache yet.

    ``runner`` auto takes the fused runner where it can serve this checkpoint on this machine, from
    its built engine, which is built first where there is none; else transformers' classes (hf). Why
    is logged, or said in the error where they cannot serve it either. Without native kernels the
    fused runner computes in torch, for int8 and int4 or where it is asked for. Each has its packed
    logits compared with transformers' plain ones. On a GPU the fused runner takes the weights as
    they are (``device/load.py``), and its kernels are compared with torch.
    ``progress``: of a build, or of loading; None: it is logged. Raises CheckpointError when the
    checkpoint cannot be served, ConfigError for keys that do not go together.
    """
    torch.set_num_threads(config.num_threads or usable_cores())
    device = choose_device(config.device)
    if device.type == "cuda" and config.attention_backend == "cpu":
        raise ConfigError("attention_backend: cpu: a GPU computes here; set device: cpu")
    if device.type == "cuda" and config.runner != "hf":
        return _load_for_gpu(checkpoint_directory, config, device, progress)
    if config.attention_backend in ("triton", "flashinfer"):
        raise ConfigError(
            f"attention_backend: {config.attention_backend}: only the fused runner on a GPU has it"
        )
    library = load_native(config.cache_dir) if device.type == "cpu" else None
    if config.runner == "hf":
        return load_hf_runner(checkpoint_directory, config, library)
    progress = progress or _logged("building the engine")
    runner = _load_fused(checkpoint_directory, config, library, progress)
    if isinstance(runner, FusedRunner):
        return runner
    return load_hf_runner(checkpoint_directory, config, library, why_not_fused=runner)


def _load_for_gpu(
    directory: Path,
    config: InflightConfig,
    device: torch.device,
    progress: Callable[[str, float], None] | None,
) -> ModelRunner:
    """The fused decoder, or with ``runner`` auto transformers' classes where it cannot serve."""
    from inflight.model.device.load import load_device_runner, make_runtime, why_not_served

    reason = why_not_served(directory, config)
    if reason is not None and config.attention_backend in ("triton", "flashinfer"):
        raise ConfigError(f"attention_backend: {config.attention_backend}: {reason}")
    if reason is None or config.runner == "fused":
        progress = progress or _logged("loading the model")
        return load_device_runner(directory, config, make_runtime(device), progress=progress)
    return load_hf_runner(directory, config, None, why_not_fused=reason)


def load_hf_runner(
    checkpoint_directory: Path,
    config: InflightConfig,
    library: NativeLibrary | None,
    *,
    why_not_fused: str | None = None,
) -> HfRunner:
    """transformers' classes over the attention that ``attention_backend`` names.

    ``why_not_fused``: where the fused runner was the first choice, what keeps it from serving.
    """
    if config.dtype in QUANTIZED_KINDS or config.dtype == FP8:
        why = f", which cannot serve this here: {why_not_fused}" if why_not_fused else ""
        raise ConfigError(f"dtype: {config.dtype}: only the fused runner computes in it{why}")
    if why_not_fused:
        _LOG.info("served by transformers' classes, slower than the fused: %s", why_not_fused)
    device = choose_device(config.device)
    if device.type == "cuda" and config.cuda_graph_mode:
        _LOG.info("cuda_graph_mode: transformers' classes run without CUDA graphs")
    from inflight.model.device.load import make_runtime
    from inflight.model.device.sizing import does_not_fit
    from inflight.model.loading import load_model
    from inflight.model.packed_model import PackedModel
    from inflight.model.probe import probe

    dtype = choose_dtype(config.dtype, device)
    try:
        model = PackedModel(load_model(checkpoint_directory, dtype=dtype, device=device))
        # int8 would hide in its rounding what the probe looks for.
        probe(model, _attention(model, config, library, dtype))
        return _hf_runner(model, config, library, make_runtime(device))
    except torch.OutOfMemoryError:
        raise does_not_fit(config, device) from None


def _hf_runner(
    model: PackedModel,
    config: InflightConfig,
    library: NativeLibrary | None,
    runtime: DeviceRuntime,
) -> HfRunner:
    """``model``: proved already."""
    from inflight.model.device.sizing import limits_of
    from inflight.model.hf_runner import HfRunner
    from inflight.model.hf_sizing import measure_hf_kv_memory

    dtype = choose_dtype(config.dtype, model.device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
    reason = _why_not_native_attention(model, config, library, kv_dtype)
    if reason is not None and config.attention_backend == "auto":
        _LOG.info("torch attends, slower than kernels would: %s", reason)

    def new_attention() -> AttentionBackend:
        return _attention(model, config, library, kv_dtype)

    max_seq_len = config.max_seq_len or model.max_position_embeddings
    limits = limits_of(config, max_seq_len)
    kv_memory_bytes = measure_hf_kv_memory(model, new_attention, limits, max_seq_len, runtime)
    return HfRunner(model, new_attention(), runtime, kv_memory_bytes=kv_memory_bytes)


def _load_fused(
    directory: Path,
    config: InflightConfig,
    library: NativeLibrary | None,
    progress: Callable[[str, float], None],
) -> FusedRunner | str:
    """On a CPU: the fused runner, or with ``runner`` auto why it does not serve this."""
    if config.runner == "fused":
        _check_goes_with_fused(config, library)
        reason = None
    elif library is not None:
        reason = why_not_native(directory, config)
    elif config.dtype in QUANTIZED_KINDS:
        reason = why_not_in_torch(directory, config)
    else:
        reason = "there are no native kernels"
    if reason is not None:
        return reason
    dtype = dtype_on_cpu(config.dtype, is_native=library is not None)
    config = config.model_copy(update={"dtype": dtype})
    if library is None:
        return _load_in_torch(directory, config, progress)
    return _load_engine(directory, config, library, progress)


def _check_goes_with_fused(config: InflightConfig, library: NativeLibrary | None) -> None:
    """Raises ConfigError for keys that ``runner: fused`` would pass over in silence, or refuse only
    behind a build; CheckpointError where native kernels are asked for and not there."""
    if library is None:
        if config.attention_backend == "cpu":
            raise CheckpointError("attention_backend: cpu: there are no native kernels")
        return
    if config.attention_backend == "torch":
        raise ConfigError(
            "attention_backend: torch: runner fused attends with its own kernels on a CPU; only "
            "runner hf has another attention"
        )
    if config.tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK:
        raise ConfigError(
            f"tokens_per_block: {config.tokens_per_block} must be one of "
            f"{', '.join(map(str, SUPPORTED_TOKENS_PER_BLOCK))} for the fused runner"
        )


def _load_in_torch(
    directory: Path, config: InflightConfig, progress: Callable[[str, float], None]
) -> FusedRunner | str:
    """As ``_load_engine``, without native kernels and without an engine that is kept."""
    from inflight.model.fused.build import build_in_memory
    from inflight.model.fused.load import why_not_fused

    reason = why_not_fused(directory)
    if reason is not None and config.runner == "auto":
        return reason
    engine = build_in_memory(directory, config, progress)
    key = engine_key(directory, config.dtype, config.cache_dir)
    prove_kv_storage(engine, key.dtype, None, config)
    return make_runner(engine.spec, engine.weights, None, config)


def _load_engine(
    directory: Path,
    config: InflightConfig,
    library: NativeLibrary,
    progress: Callable[[str, float], None],
) -> FusedRunner | str:
    """The runner of the built engine, or why the checkpoint cannot be fused."""
    engine = find_engine(directory, config)
    key = engine_key(directory, config.dtype, config.cache_dir)
    if engine is None:
        from inflight.model.fused.build import build_engine
        from inflight.model.fused.load import why_not_fused

        reason = why_not_fused(directory)
        if reason is not None and config.runner == "auto":
            EngineStore(config.cache_dir).note_reason_against(key, reason)
            return reason
        engine = build_engine(directory, config, library, progress)  # and proves it
    else:
        prove(engine, key.dtype, library, config.tokens_per_block)
    prove_kv_storage(engine, key.dtype, library, config)
    note_limits(key, config, engine.spec)
    return make_runner(engine.spec, engine.weights, library, config)


def _logged(task: str) -> Callable[[str, float], None]:
    """A line for each thing that is done for ``task``, and one for each tenth of the whole."""
    said: set[tuple[str, int]] = set()

    def log(what: str, share: float) -> None:
        line = what, int(share * 10)
        if line not in said:
            said.add(line)
            _LOG.info("%s: %s (%d%%)", task, what, 10 * line[1])

    return log


def _attention(
    model: PackedModel,
    config: InflightConfig,
    library: NativeLibrary | None,
    kv_dtype: torch.dtype,
) -> AttentionBackend:
    if config.attention_backend == "torch":
        return TorchAttention(kv_dtype, model.device)
    reason = _why_not_native_attention(model, config, library, kv_dtype)
    if library is not None and reason is None:
        library.set_num_threads(torch.get_num_threads())
        return NativeAttentionBackend(library, kv_dtype)
    if config.attention_backend == "cpu":
        raise CheckpointError(f"attention_backend: cpu: {reason}")
    return TorchAttention(kv_dtype, model.device)


def _why_not_native_attention(
    model: PackedModel,
    config: InflightConfig,
    library: NativeLibrary | None,
    kv_dtype: torch.dtype,
) -> str | None:
    """None: it attends, unless ``attention_backend`` wants another."""
    reason = unsupported_layers(model.layers, model.dtype, model.device)
    if reason is not None:
        return reason
    if library is None:
        return "there are no native kernels"
    if kv_dtype not in KV_KINDS:
        return f"native attention does not store {kv_dtype}"
    # Asked for by name, it refuses other numbers itself and says which it takes.
    is_asked_for = config.attention_backend == "cpu"
    if config.tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK and not is_asked_for:
        return f"not with tokens_per_block {config.tokens_per_block}"
    return None
