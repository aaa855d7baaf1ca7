"""From a checkpoint folder to a transformers model in memory, with one line for what is wrong."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from inflight.errors import CheckpointError
from inflight.model.architectures import PROVED, check_architecture
from inflight.native.packed import WeightKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

QUANTIZED_KINDS: Mapping[str, WeightKind] = {"int8": "q8_0", "int4": "q4_1"}
"""Values of the key ``dtype`` that name weights in blocks of 32; activations are then bf16."""

_LOG = logging.getLogger(__name__)
_LONGEST_REASON = 300


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``name``: a key of DTYPES or QUANTIZED_KINDS, or "auto": bf16 where the hardware computes it,
    else fp32."""
    if name in QUANTIZED_KINDS:
        return torch.bfloat16
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if _computes_bf16(device) else torch.float32


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint's causal language model in eval mode, without gradients, on ``device``.

    Only local files are read and no code of the checkpoint is run. Raises CheckpointError: not
    found, not understood, an architecture that is not served, weights that are missing.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"model_dir: {directory} has no config.json")
    local = {"local_files_only": True, "trust_remote_code": False}
    with _quiet_transformers():
        with _reasons(directory, "its config.json is not understood"):
            config = AutoConfig.from_pretrained(directory, **local)
        check_architecture(config)
        if config.model_type not in PROVED:
            _LOG.warning("architecture %s is not among those proved by tests", config.model_type)
        with _reasons(directory, "its weights cannot be loaded"):
            model, report = AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=dtype, output_loading_info=True, **local
            )
            _check_report(directory, report)
            return model.requires_grad_(False).eval().to(device)


def one_line(error: Exception) -> str:
    """What a library says of a fault, which may be pages, as the end of an error of ours."""
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


def _computes_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN also says yes to processors that would convert every operand to fp32 and back.
        return torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _check_report(directory: Path, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"model_dir: {directory}: {len(missing)} weights are missing, among them {missing[0]}"
        )


@contextmanager
def _reasons(directory: Path, what: str) -> Iterator[None]:
    """Turns whatever transformers and the file formats raise into one CheckpointError line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"model_dir: {directory}: {what}: {one_line(error)}") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and load reports: what matters in them is raised as an error."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
