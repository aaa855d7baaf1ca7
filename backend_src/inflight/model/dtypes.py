"""The keys ``dtype`` and ``kv_cache_dtype``: what is stored and computed in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inflight.native.cpu import computes_bf16
from inflight.native.packed import WeightKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

QUANTIZED_KINDS: Mapping[str, WeightKind] = {"int8": "q8_0", "int4": "q4_1"}
"""Values of the key ``dtype`` that name weights in blocks of 32; activations are then bf16."""

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``name``: a key of DTYPES or QUANTIZED_KINDS, or "auto": bf16 where the hardware computes it,
    else fp32."""
    if name in QUANTIZED_KINDS:
        return torch.bfloat16
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = computes_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """``name``: a key of KV_DTYPES, or "auto": ``dtype``, that of the activations."""
    return dtype if name == "auto" else KV_DTYPES[name]
