"""load_runner: from a checkpoint folder and the configuration to the runner that serves it."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import torch

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model.architectures import check_architecture
from inflight.model.attention import AttentionBackend
from inflight.model.fused.families import can_fuse
from inflight.model.fused.load import build_fused_runner, read_hf_config
from inflight.model.fused.tensors import has_safetensors
from inflight.model.hf_runner import HfRunner
from inflight.model.loading import QUANTIZED_KINDS, choose_device, choose_dtype, load_model
from inflight.model.native_attention import NativeAttentionBackend, unsupported_layers
from inflight.model.packed_model import PackedModel
from inflight.model.probe import probe
from inflight.model.runner import ModelRunner
from inflight.model.torch_attention import TorchAttention
from inflight.native.attention import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.library import NativeLibrary, load_native

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")

_LOG = logging.getLogger(__name__)


def load_runner(checkpoint_directory: Path, config: InflightConfig) -> ModelRunner:
    """Loads the weights and sets the number of compute threads. The runner has no KV cache yet.

    ``runner`` auto takes the fused runner where it can serve this checkpoint on this machine, else
    transformers' classes (hf), whose packed logits are compared with their plain ones first. Raises
    CheckpointError when the checkpoint cannot be served, ConfigError for keys that do not go
    together.
    """
    torch.set_num_threads(config.num_threads or usable_cores())
    device = choose_device()
    library = load_native(config.cache_dir) if device.type == "cpu" else None
    if config.runner == "fused":
        return build_fused_runner(checkpoint_directory, config, library)
    if config.runner == "auto":
        reason = _why_not_fused(checkpoint_directory, config, device, library)
        if reason is None:
            return build_fused_runner(checkpoint_directory, config, library)
        _LOG.info("served by transformers' classes, slower than the fused runner: %s", reason)
    return load_hf_runner(checkpoint_directory, config, library)


def load_hf_runner(
    checkpoint_directory: Path, config: InflightConfig, library: NativeLibrary | None
) -> HfRunner:
    """transformers' classes over the attention that ``attention_backend`` names."""
    if config.dtype in QUANTIZED_KINDS:
        raise ConfigError(f"dtype: {config.dtype}: only the fused runner computes in it")
    device = choose_device()
    dtype = choose_dtype(config.dtype, device)
    model = PackedModel(load_model(checkpoint_directory, dtype=dtype, device=device))
    probe(model, _attention(model, config, library))
    return HfRunner(model, _attention(model, config, library))


def usable_cores() -> int:
    """Cores that this process may use: its affinity, capped by the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA_FILE.read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max": no quota
        return cores


def _why_not_fused(
    directory: Path, config: InflightConfig, device: torch.device, library: NativeLibrary | None
) -> str | None:
    if device.type != "cpu":
        return f"the fused runner computes on the CPU, not on {device.type}"
    if library is None:
        return "there are no native kernels"
    if config.attention_backend == "torch":
        return "attention_backend is torch"
    if config.tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK:
        return f"native kernels do not take tokens_per_block {config.tokens_per_block}"
    if config.dtype == "fp16":
        return "native kernels do not compute in fp16"
    if not (directory / "config.json").is_file() or not has_safetensors(directory):
        return "the checkpoint has no safetensors weights"
    hf_config = read_hf_config(directory)
    check_architecture(hf_config)
    return can_fuse(hf_config)


def _attention(
    model: PackedModel, config: InflightConfig, library: NativeLibrary | None
) -> AttentionBackend:
    if config.attention_backend == "torch":
        return TorchAttention(model.dtype, model.device)
    reason = "there are no native kernels"
    if library is not None:
        reason_of_layers = unsupported_layers(model.layers, model.dtype, model.device)
        fits_blocks = config.tokens_per_block in SUPPORTED_TOKENS_PER_BLOCK
        if reason_of_layers is None and (fits_blocks or config.attention_backend == "cpu"):
            library.set_num_threads(torch.get_num_threads())
            return NativeAttentionBackend(library, model.dtype)
        reason = reason_of_layers or f"not with tokens_per_block {config.tokens_per_block}"
    if config.attention_backend == "cpu":
        raise CheckpointError(f"attention_backend: cpu: {reason}")
    return TorchAttention(model.dtype, model.device)
