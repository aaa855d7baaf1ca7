"""Which retention a block has: a request's KvCacheRetentionConfig, block by block."""

from __future__ import annotations

from typing import NamedTuple

from inflight.api.kv import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig


class Retention(NamedTuple):
    """How a block is kept once nobody holds it."""

    priority: int = DEFAULT_RETENTION_PRIORITY
    """0..100; lower ones are evicted first."""
    duration_ms: int | None = None
    """After it the default priority counts; None = never."""
    ends_at: float | None = None
    """Clock seconds at which the duration is over; None: it has not begun, or there is none."""

    def begun(self, now: float) -> Retention:
        """Nobody holds the block any more: a duration runs from ``now`` on, if it does not yet."""
        if self.duration_ms is None or self.ends_at is not None:
            return self
        return self._replace(ends_at=now + self.duration_ms / 1000)

    def used(self, now: float) -> Retention:
        """The block is wanted again: a duration that is not over will begin anew."""
        return self.at(now)._replace(ends_at=None)

    def at(self, now: float) -> Retention:
        """What is left of it."""
        is_over = self.ends_at is not None and self.ends_at <= now
        return DEFAULT_RETENTION if is_over else self


DEFAULT_RETENTION = Retention()


class BlockRetention(NamedTuple):
    """What a request says about its blocks."""

    config: KvCacheRetentionConfig
    prompt_length: int

    def of_block(self, index: int, tokens_per_block: int) -> Retention | None:
        """Of the block that holds tokens [index * T, (index + 1) * T); None: nothing is said."""
        start = index * tokens_per_block
        if start >= self.prompt_length:
            return Retention(self.config.decode_retention_priority, self.config.decode_duration_ms)
        end = min(start + tokens_per_block, self.prompt_length)
        stated = [
            Retention(item.priority, item.duration_ms)
            for item in self.config.token_range_retention_configs
            if item.token_start < end and (item.token_end is None or item.token_end > start)
        ]
        return max(stated, key=lambda retention: retention.priority, default=None)
