"""load_fused_runner: from a checkpoint folder to a FusedRunner, its weights packed afresh.

A server loads a built engine instead (``built.py``); this is what the engine's build and the tests
begin with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError, one_line
from inflight.model.architectures import check_architecture
from inflight.model.choice import dtype_on_cpu
from inflight.model.dtypes import FP8, QUANTIZED_KINDS, choose_dtype
from inflight.model.fused.assemble import make_runner
from inflight.model.fused.families import can_fuse, decoder_spec
from inflight.model.fused.runner import FusedRunner
from inflight.model.fused.spec import DecoderSpec
from inflight.model.fused.tensors import CheckpointTensors
from inflight.model.fused.weights import load_weights
from inflight.native.library import NativeLibrary, load_native
from inflight.native.packed import WeightKind

_KINDS: Mapping[torch.dtype, WeightKind] = {torch.float32: "f32", torch.bfloat16: "bf16"}


def read_hf_config(checkpoint_directory: Path) -> Any:
    """The checkpoint's configuration, nothing else of it. Raises CheckpointError when it is not
    understood."""
    try:
        return AutoConfig.from_pretrained(
            checkpoint_directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"model_dir: {checkpoint_directory}: its config.json is not understood: "
            f"{one_line(error)}"
        ) from error


def why_not_fused(checkpoint_directory: Path) -> str | None:
    """The reason, for a person; None: the fused runner can serve it. Raises CheckpointError for a
    checkpoint that nobody serves."""
    hf_config = read_hf_config(checkpoint_directory)
    check_architecture(hf_config)
    return can_fuse(hf_config)


def read_spec(checkpoint_directory: Path) -> DecoderSpec:
    """Raises CheckpointError when the checkpoint is not served or cannot be fused."""
    reason = why_not_fused(checkpoint_directory)
    if reason is not None:
        raise CheckpointError(f"runner: fused: {reason}")
    return decoder_spec(read_hf_config(checkpoint_directory))


def weight_kinds(dtype: str) -> tuple[WeightKind, torch.dtype]:
    """Of the linears and of the activations, for a value of the key ``dtype``, never auto. Raises
    ConfigError for one that is not computed here."""
    assert dtype != "auto"
    activations = choose_dtype(dtype, torch.device("cpu"))
    if activations not in _KINDS or dtype == FP8:
        raise ConfigError(
            f"dtype: {dtype}: the fused runner computes in bf16, fp32, int8 and int4 on a CPU"
        )
    return QUANTIZED_KINDS.get(dtype, _KINDS[activations]), activations


def load_fused_runner(
    checkpoint_directory: Path, config: InflightConfig, *, weight_kind: WeightKind | None = None
) -> FusedRunner:
    """The runner without its KV cache; on the native kernels where they can be had, else in torch,
    with a warning. They use as many threads as torch does.

    ``weight_kind``: of the linears; None: what ``config.dtype`` says. Raises CheckpointError when
    the checkpoint is not served or cannot be fused, ConfigError for a dtype that is not computed
    here.
    """
    return build_fused_runner(
        checkpoint_directory, config, load_native(config.cache_dir), weight_kind=weight_kind
    )


def build_fused_runner(
    checkpoint_directory: Path,
    config: InflightConfig,
    library: NativeLibrary | None,
    *,
    weight_kind: WeightKind | None = None,
) -> FusedRunner:
    """``load_fused_runner`` on a library that is loaded already; None: in torch."""
    dtype = dtype_on_cpu(config.dtype, is_native=library is not None)
    kind, activations = weight_kinds(dtype)
    spec = read_spec(checkpoint_directory)
    tensors = CheckpointTensors(checkpoint_directory)
    weights = load_weights(tensors, spec, weight_kind or kind, activations)
    return make_runner(spec, weights, library, config)
