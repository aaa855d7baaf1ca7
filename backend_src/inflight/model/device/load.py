"""load_device_runner: from a checkpoint folder to a DeviceRunner, proved on its device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inflight.api.config import InflightConfig, process_environment
from inflight.cache_folder import cache_root
from inflight.checkpoint.files import has_safetensors
from inflight.errors import ConfigError
from inflight.kernels.compiler import lacking_to_compile
from inflight.kernels.kv_layout import (
    SUPPORTED_TOKENS_PER_BLOCK,
    KvShape,
    unsupported_reason,
)
from inflight.model.device.buckets import bucket_sizes
from inflight.model.device.cuda_runtime import FP8_CAPABILITY, CudaRuntime
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.kv_cache import DeviceKvCache
from inflight.model.device.linears import (
    ScaledProduct,
    reference_scaled_product,
    scaled_product,
)
from inflight.model.device.ops import DeviceOps
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.device.proof import prove_kernels
from inflight.model.device.runner import DeviceRunner
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.device.sampler import DeviceSampler
from inflight.model.device.sizing import does_not_fit, limits_of, measure_kv_memory
from inflight.model.device.torch_ops import TorchOps
from inflight.model.device.weights import DeviceWeights, WeightFormat, load_device_weights
from inflight.model.dtypes import FP8, QUANTIZED_KINDS, choose_dtype, choose_kv_dtype
from inflight.model.fused.decoder_tensors import DecoderTensors
from inflight.model.fused.load import read_spec, why_not_fused
from inflight.model.fused.spec import DecoderSpec
from inflight.model.fused.tensors import CheckpointTensors

if TYPE_CHECKING:
    from inflight.kernels.tuning import AttentionShape

_LOG = logging.getLogger(__name__)

LAUNCHES_FILE = "kernels.json"
"""In the cache folder: how kernels are best launched, as measured."""


def launches_file(config: InflightConfig) -> Path:
    return cache_root(config.cache_dir) / LAUNCHES_FILE


def make_runtime(device: torch.device) -> DeviceRuntime:
    return CudaRuntime(device) if device.type == "cuda" else PlainRuntime(device)


def why_not_on_device(spec: DecoderSpec, config: InflightConfig) -> str | None:
    """What keeps a decoder, or the configuration, from the device runner; None: nothing does."""
    if config.dtype in QUANTIZED_KINDS:
        return f"dtype {config.dtype} is computed on a CPU only"
    if config.kv_cache_dtype == "int8":
        return "kv_cache_dtype int8 is stored on a CPU only"
    if config.attention_backend == "cpu":
        return "attention_backend is cpu"
    if config.tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK:
        return f"GPU kernels do not take tokens_per_block {config.tokens_per_block}"
    return unsupported_reason(spec.head_dim, spec.head_dim, torch.float16)


def why_not_served(checkpoint_directory: Path, config: InflightConfig) -> str | None:
    """As ``why_not_on_device``, of a checkpoint. Raises CheckpointError for one that nobody
    serves."""
    reason = why_not_fused(checkpoint_directory)
    if reason is not None:
        return reason
    if not has_safetensors(checkpoint_directory):
        return "the checkpoint has no safetensors weights"
    missing = why_no_kernels(config)
    return missing or why_not_on_device(read_spec(checkpoint_directory), config)


def load_device_runner(
    checkpoint_directory: Path,
    config: InflightConfig,
    runtime: DeviceRuntime,
    *,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> DeviceRunner:
    """The runner without its KV cache. ``progress``: what is done, and the share of it in [0, 1].

    Raises CheckpointError when the checkpoint is not served, cannot be fused or does not fit into
    the device's memory, or when the kernels compute something else than torch; ConfigError for keys
    that do not go together.
    """
    if runtime.device.type == "cuda" and (missing := why_no_kernels(config)) is not None:
        raise ConfigError(f"runner: fused: {missing}")
    spec = read_spec(checkpoint_directory)
    tune_kernels(spec, config, runtime, progress)
    tensors = CheckpointTensors(checkpoint_directory, str(runtime.device))
    return make_device_runner(
        spec, DecoderTensors(tensors, spec), config, runtime, progress=progress
    )


def tune_kernels(
    spec: DecoderSpec,
    config: InflightConfig,
    runtime: DeviceRuntime,
    progress: Callable[[str, float], None],
) -> None:
    """Measures on a GPU how its attention is best launched, and whether FlashInfer is faster where
    it is installed, unless that is known already. Takes most of a minute, once for a card and a
    shape of heads; FlashInfer compiles for longer. Where others have filled the card the next load
    tries again."""
    if runtime.device.type != "cuda" or config.attention_backend == "torch":
        return
    from inflight.kernels.tuning import is_measured, tune
    from inflight.model.device.flashinfer_choice import compare, score_kinds

    file, shape = launches_file(config), _attention_shape(spec, config, runtime)

    def on_start() -> None:
        progress("measuring kernels (once)", 0.0)

    try:
        with runtime.computing():
            if not is_measured(file, shape, runtime.device):
                on_start()
                tune(file, shape, runtime.device)
            if config.attention_backend == "auto":
                compare(file, shape, score_kinds(spec), runtime, on_start)
    except OSError as error:
        _LOG.warning("cache_dir: %s: %s: measured kernels are not kept", file, error.strerror)
    except torch.OutOfMemoryError:
        _LOG.warning("no memory on %s to measure kernels: they run as usual", runtime.device)
    finally:
        if runtime.memory is not None:
            runtime.memory.release()  # of the loads, whether they fitted or not


def make_device_runner(
    spec: DecoderSpec,
    tensors: DecoderTensors,
    config: InflightConfig,
    runtime: DeviceRuntime,
    *,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> DeviceRunner:
    """As ``load_device_runner``, of tensors that lie on the device when they are asked for."""
    reason = why_not_on_device(spec, config)
    if reason is not None:
        raise ConfigError(f"runner: fused: {reason}")
    dtype = choose_dtype(config.dtype, runtime.device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
    max_seq_len = config.max_seq_len or spec.max_position_embeddings
    limits = limits_of(config, max_seq_len)
    shape = KvShape(
        num_layers=len(spec.layers),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
    )
    form = WeightFormat(dtype=dtype, scaled_product=_scaled_product(config, runtime))
    try:
        with runtime.computing():
            ops = _make_ops(spec, config, runtime)  # may refuse, and weights take minutes
            weights = _load_weights(tensors, spec, form, runtime, progress)
            decoder = DeviceDecoder(spec, weights, ops, max_seq_len=max_seq_len)
            sampler = DeviceSampler(limits.sampling_room, spec.vocab_size, runtime.device)
        if not isinstance(ops, TorchOps):
            progress("comparing kernels with torch", 1.0)
            prove_kernels(decoder, shape, limits.tokens_per_block, runtime)
        kv_memory_bytes = measure_kv_memory(decoder, sampler, shape, limits, runtime)
    except torch.OutOfMemoryError:
        raise does_not_fit(config, runtime.device) from None
    return DeviceRunner(
        decoder,
        DeviceKvCache(shape, ops, runtime, config.kv_cache_host_memory_bytes),
        sampler,
        runtime,
        limits=limits,
        graph_sizes=_graph_sizes(config, runtime),
        kv_memory_bytes=kv_memory_bytes,
    )


def _load_weights(
    tensors: DecoderTensors,
    spec: DecoderSpec,
    form: WeightFormat,
    runtime: DeviceRuntime,
    progress: Callable[[str, float], None],
) -> DeviceWeights:
    def on_layer(layer: int) -> None:
        progress(f"loading weights to {runtime.device}", (layer + 1) / len(spec.layers))

    return load_device_weights(tensors, spec, form, on_layer=on_layer)


def _scaled_product(config: InflightConfig, runtime: DeviceRuntime) -> ScaledProduct | None:
    """Of fp8 weights; None: they are not wanted."""
    if config.dtype != FP8:
        return None
    if not isinstance(runtime, CudaRuntime):
        return reference_scaled_product
    if not runtime.has_fp8:
        major, minor = FP8_CAPABILITY
        raise ConfigError(
            f"dtype: fp8: needs a GPU of compute capability {major}.{minor} or higher"
        )
    return scaled_product


def _make_ops(spec: DecoderSpec, config: InflightConfig, runtime: DeviceRuntime) -> DeviceOps:
    """Kernels on a GPU unless the configuration wants torch; on other devices torch, unless it
    wants kernels, which run under their interpreter there. Raises ConfigError where it wants
    FlashInfer and cannot have it."""
    wanted = config.attention_backend
    if wanted == "torch" or (wanted == "auto" and runtime.device.type != "cuda"):
        return TorchOps()
    # Need Triton, which not every machine has.
    from inflight.kernels.tuning import launches_for
    from inflight.model.device.kernel_ops import KernelOps

    file, shape = launches_file(config), _attention_shape(spec, config, runtime)
    launches = launches_for(file, shape, runtime.device)
    if wanted == "triton":
        return KernelOps(spec, launches, runtime.device)
    from inflight.model.device.flashinfer_attention import FlashInferAttention
    from inflight.model.device.flashinfer_choice import chosen_phases, score_kinds
    from inflight.model.device.flashinfer_ops import FlashInferOps

    kinds, is_forced = score_kinds(spec), wanted == "flashinfer"
    phases = chosen_phases(file, shape, kinds, runtime, is_forced=is_forced)
    if phases is None:
        return KernelOps(spec, launches, runtime.device)
    _LOG.info("FlashInfer attends, but in CUDA graphs: %s", phases)
    attention = FlashInferAttention(shape, kinds, runtime)
    return FlashInferOps(spec, launches, runtime.device, attention, phases)


def _attention_shape(
    spec: DecoderSpec, config: InflightConfig, runtime: DeviceRuntime
) -> AttentionShape:
    from inflight.kernels.tuning import AttentionShape

    dtype = choose_dtype(config.dtype, runtime.device)
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        tokens_per_block=config.tokens_per_block,
        dtype=choose_kv_dtype(config.kv_cache_dtype, dtype),
    )


def why_no_kernels(config: InflightConfig) -> str | None:
    """What keeps kernels from being compiled for a card. None: nothing, or they are not wanted."""
    if config.attention_backend == "torch":
        return None
    try:
        import inflight.model.device.kernel_ops  # noqa: F401
    except ConfigError as error:
        return str(error)
    lacking = lacking_to_compile(process_environment())
    return f"Triton compiles with {' and '.join(lacking)}: there is none" if lacking else None


def _graph_sizes(config: InflightConfig, runtime: DeviceRuntime) -> tuple[int, ...]:
    if not config.cuda_graph_mode:
        return ()
    # Torch's attention waits for the device, which no graph of a GPU can hold.
    if config.attention_backend == "torch" and runtime.device.type == "cuda":
        _LOG.info("cuda_graph_mode: torch's attention runs without CUDA graphs")
        return ()
    return bucket_sizes(config.max_batch_size, config.cuda_graph_cache_size)
