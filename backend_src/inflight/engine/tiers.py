"""Making the KV tiers that are configured."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from inflight.api.executor_config import ExecutorConfig, KvCachePausePolicy, KvTiersConfig
from inflight.engine.pools import outgrown_windows
from inflight.errors import ConfigError
from inflight.kv_cache import CacheObservers
from inflight.kv_cache.tiers import (
    DiskStorage,
    HostStorage,
    KvTiers,
    TierCascade,
    TierReporter,
)
from inflight.kv_cache.tiers.block_file import BlockFiles
from inflight.kv_cache.tiers.cost import OnboardCost
from inflight.model.runner import ModelRunner

logger = logging.getLogger(__name__)


def make_tiers(
    runner: ModelRunner,
    config: ExecutorConfig,
    *,
    model_identity: str | None,
    clock: Callable[[], float],
) -> KvTiers | None:
    """None where none is configured. ``runner`` has its KV cache; ``model_identity``: see Engine.

    Says in the log what is configured and has no effect. Raises ConfigError where the disk tier's
    folder cannot be used, or a tier holds no block.
    """
    tiers = config.kv_cache_config.tiers
    _warn_of_unused(tiers)
    if not tiers.exist:
        return None
    if outgrown_windows(runner.spec, config):
        logger.warning(
            "KV tiers: all layers share one pool, so those with a sliding window keep all their KV"
        )
    tokens_per_block = config.kv_cache_config.tokens_per_block
    block_bytes = runner.spec.kv_bytes_per_token * tokens_per_block
    check_sizes(tiers, block_bytes)
    disk = None
    if tiers.disk_bytes:
        fingerprint = _fingerprint(runner, block_bytes, model_identity, tiers)
        disk = DiskStorage(
            Path(tiers.disk_path),
            tiers.disk_bytes,
            BlockFiles(fingerprint),
            keeps_files=tiers.disk_persist,
            clock=clock,
        )
    host = HostStorage(tiers.host_memory_bytes, clock) if tiers.host_memory_bytes else None
    logger.info(
        "KV tiers: %d MiB of host memory, %d MiB on disk, holding %d blocks",
        tiers.host_memory_bytes >> 20,
        tiers.disk_bytes >> 20,
        0 if disk is None else disk.usage.num_blocks,
    )
    return KvTiers(
        TierCascade(host, disk),
        runner,
        OnboardCost(block_bytes, tokens_per_block),
        pause_policy=tiers.pause_policy,
        onboards=tiers.onboard_blocks,
        clock=clock,
    )


def make_reporter(tiers: KvTiers | None, observers: CacheObservers) -> TierReporter | None:
    """None where nobody wants to hear of tiers, or there are none."""
    if tiers is None or not (observers.host or observers.disk):
        return None
    return TierReporter(tiers.cascade, observers)


def _warn_of_unused(tiers: KvTiersConfig) -> None:
    has_policy = tiers.pause_policy is not KvCachePausePolicy.AUTO
    unused = {
        "kv_cache_disk_path": bool(tiers.disk_path) and not tiers.disk_bytes,
        "kv_cache_pause_policy": has_policy and not tiers.exist,
        "kv_cache_onboard_blocks": not tiers.onboard_blocks and not tiers.exist,
    }
    keys = [key for key, is_unused in unused.items() if is_unused]
    if keys:
        logger.warning("%s: without effect, as no such KV tier is configured", ", ".join(keys))


def check_sizes(tiers: KvTiersConfig, block_bytes: int) -> None:
    """Raises ConfigError where a tier that is wanted holds no block."""
    for key in ("host_memory_bytes", "disk_bytes"):
        size = getattr(tiers, key)
        if 0 < size < block_bytes:
            raise ConfigError(f"kv_cache_{key}: {size} holds no KV block; one has {block_bytes}")


def _fingerprint(
    runner: ModelRunner, block_bytes: int, model_identity: str | None, tiers: KvTiersConfig
) -> bytes:
    if model_identity is None:
        if tiers.disk_persist:
            raise ConfigError("kv_cache_disk_persist: needs a checkpoint that can be told apart")
        model_identity = secrets.token_hex(32)  # of this process alone
    facts = (model_identity, runner.kv_block_format, str(block_bytes))
    return hashlib.sha256("\0".join(facts).encode()).digest()
