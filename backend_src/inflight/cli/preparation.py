"""What is made once and kept in the cache: the converted checkpoint and the native kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from inflight.api.config import InflightConfig
from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.cli import preflight
from inflight.native.build import NativeUnavailableError, build_native

_QUICK_SECONDS = 1.0


def prepare(config: InflightConfig, say: Callable[[str], None]) -> Checkpoint:
    """Both, side by side, so that a first start is short; nothing to do at the next one.

    Raises CheckpointError. Kernels that cannot be compiled are no error: the engine computes in
    torch then, and says so.
    """
    kernels = threading.Thread(target=_compile_kernels, args=(config.cache_dir,), daemon=True)
    if not preflight.has_gpu():
        kernels.start()
    checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
    if kernels.ident is not None:
        kernels.join(_QUICK_SECONDS)
        if kernels.is_alive():
            say("compiling the native kernels (once)")
            kernels.join()
    return checkpoint


def _compile_kernels(cache_dir: str) -> None:
    with contextlib.suppress(NativeUnavailableError):
        build_native(cache_dir)
