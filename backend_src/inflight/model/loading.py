"""From a checkpoint folder to a transformers model in memory, with one line for what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from inflight.errors import CheckpointError, one_line
from inflight.model.architectures import PROVED, check_architecture

_LOG = logging.getLogger(__name__)


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
