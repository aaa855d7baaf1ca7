"""The keys ``device``, ``dtype`` and ``kv_cache_dtype``: where and in what is computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inflight.errors import ConfigError
from inflight.model.choice import dtype_on_cpu
from inflight.native.packed import WeightKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

QUANTIZED_KINDS: Mapping[str, WeightKind] = {"int8": "q8_0", "int4": "q4_1"}
"""Values of the key ``dtype`` that name weights in blocks of 32; activations are then bf16."""

FP8 = "fp8"
"""The value of the key ``dtype`` that names weights in fp8; activations are then bf16."""

KV_DTYPES = {**DTYPES, "int8": torch.int8}


def choose_device(name: str = "auto") -> torch.device:
    """For a value of the key ``device``. Raises ConfigError for a GPU that torch does not find."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device: cuda: torch finds no CUDA device")
    return torch.device("cuda", 0) if has_cuda and name != "cpu" else torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Of the activations, for a value of the key ``dtype``; "auto": what a GPU, or torch on a CPU,
    computes well: bf16 where the hardware does, else fp32. (What native kernels compute in says
    ``choice.dtype_on_cpu``.)"""
    if name in QUANTIZED_KINDS or name == FP8:
        return torch.bfloat16
    if device.type == "cpu":
        return DTYPES[dtype_on_cpu(name, is_native=False)]
    if name != "auto":
        return DTYPES[name]
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float32


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """``name``: a key of KV_DTYPES, or "auto": ``dtype``, that of the activations."""
    return dtype if name == "auto" else KV_DTYPES[name]
