"""``inflight build``: a checkpoint as a built engine, in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.cli.progress import build_progress
from inflight.engine_files.key import EngineKey, engine_key
from inflight.engine_files.store import EngineStore
from inflight.executor.executor import SEQ_LEN_CEILING
from inflight.model.choice import dtype_on_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    checkpoint: Checkpoint
    config: InflightConfig
    """With max_seq_len resolved, as a server has it."""


def build(config: InflightConfig, say: Callable[[str], None]) -> Built:
    """Makes what a server with ``config`` loads, and loads it once: the proof is part of that.

    Raises CheckpointError, ConfigError.
    """
    set_thread_defaults()
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=say)
    config = with_max_seq_len(config, checkpoint)
    from inflight.model.factory import load_runner  # torch: seconds

    dtype = dtype_on_cpu(config.dtype, is_native=True)  # only kernels have an engine to keep
    key = engine_key(checkpoint.directory, dtype, config.cache_dir)
    store = EngineStore(config.cache_dir)
    if not store.has(key):
        # transformers: seconds. At a first start load_runner waits for kernels, so it comes before.
        import inflight.model.fused.build  # noqa: F401
    started = time.monotonic()
    with build_progress(say) as progress:
        load_runner(checkpoint.directory, config, progress=progress)
    say(_result(checkpoint, store, key, time.monotonic() - started))
    return Built(checkpoint=checkpoint, config=config)


def with_max_seq_len(config: InflightConfig, checkpoint: Checkpoint) -> InflightConfig:
    """As the executor resolves it."""
    longest = min(checkpoint.max_position_embeddings, SEQ_LEN_CEILING)
    return config.model_copy(update={"max_seq_len": config.max_seq_len or longest})


def _result(checkpoint: Checkpoint, store: EngineStore, key: EngineKey, seconds: float) -> str:
    if not store.has(key):
        why = store.reason_against(key)
        return f"there is no engine of {checkpoint.name} to keep{f': {why}' if why else ''}"
    folder = store.folder(key)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    return (
        f"the engine of {checkpoint.name} ({key.dtype}, {size:.0f} MB) is in {folder}, "
        f"loaded and compared with transformers in {seconds:.1f} s"
    )
