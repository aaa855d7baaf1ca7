"""load_fused_runner: from a checkpoint folder and the configuration to a FusedRunner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model.architectures import check_architecture
from inflight.model.fused.families import can_fuse, decoder_spec
from inflight.model.fused.forward import FusedDecoder
from inflight.model.fused.ops import native_ops, reference_ops
from inflight.model.fused.runner import FusedRunner
from inflight.model.fused.tensors import CheckpointTensors
from inflight.model.fused.weights import load_weights
from inflight.model.loading import QUANTIZED_KINDS, choose_dtype, one_line
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
    dtype = choose_dtype(config.dtype, torch.device("cpu"))
    if dtype not in _KINDS:
        raise ConfigError(f"dtype: {config.dtype}: the fused runner computes in bf16 and fp32")
    hf_config = read_hf_config(checkpoint_directory)
    check_architecture(hf_config)
    reason = can_fuse(hf_config)
    if reason is not None:
        raise CheckpointError(f"runner: fused: {reason}")
    spec = decoder_spec(hf_config)
    tensors = CheckpointTensors(checkpoint_directory)
    kind = weight_kind or QUANTIZED_KINDS.get(config.dtype, _KINDS[dtype])
    weights = load_weights(tensors, spec, kind, dtype)
    if library is None:
        ops = reference_ops(spec, dtype)
    else:
        library.set_num_threads(torch.get_num_threads())
        ops = native_ops(library, spec, dtype)
    decoder = FusedDecoder(
        spec,
        weights,
        ops,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len or spec.max_position_embeddings,
    )
    return FusedRunner(decoder)
