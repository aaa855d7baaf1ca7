"""What keeps the fused runner from serving on a CPU, as far as configuration and files tell, and
what ``dtype`` auto is there.

Needs no torch: ``inflight serve`` asks it whether there is an engine to build, and of which dtype.
"""

from __future__ import annotations

from pathlib import Path

from inflight.api.config import InflightConfig
from inflight.checkpoint.files import has_safetensors
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.cpu import computes_bf16


def dtype_on_cpu(name: str, *, is_native: bool) -> str:
    """What ``name``, a value of the key ``dtype``, stands for, whatever the checkpoint is in.
    ``is_native``: native kernels compute the linears; else torch does.

    Where the CPU has no product of bf16, kernels expand it as they multiply: steps take less time
    than in fp32 or about as much, and half the memory. torch is several times slower in it then.
    """
    if name != "auto":
        return name
    return "bf16" if is_native or computes_bf16() else "fp32"


def why_not_native(directory: Path, config: InflightConfig) -> str | None:
    """What keeps it from native kernels that are there; None: nothing does."""
    if config.attention_backend == "torch":
        return "attention_backend is torch"
    if config.tokens_per_block not in SUPPORTED_TOKENS_PER_BLOCK:
        return f"native kernels do not take tokens_per_block {config.tokens_per_block}"
    if config.dtype == "fp8":
        return "fp8 is computed on a GPU only"
    if config.dtype == "fp16":
        return "native kernels do not compute in fp16"
    if config.kv_cache_dtype == "fp16":
        return "native kernels do not store fp16"
    return _why_not_readable(directory)


def why_not_in_torch(directory: Path, config: InflightConfig) -> str | None:
    """What keeps it from computing int8 and int4 in torch; None: nothing does."""
    if config.attention_backend == "cpu":
        return "there are no native kernels"
    if config.kv_cache_dtype == "fp16":
        return "fp16 is stored on a GPU only"
    return _why_not_readable(directory)


def _why_not_readable(directory: Path) -> str | None:
    if not (directory / "config.json").is_file() or not has_safetensors(directory):
        return "the checkpoint has no safetensors weights"
    return None
