"""HostStorage: the tier in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import Retention
from inflight.kv_cache.tiers.index import TierIndex
from inflight.kv_cache.tiers.storage import TierBlock, TierUsage


class HostStorage:
    """A TierStorage; blocks are kept as they come, no byte is copied. Not thread-safe.

    ``max_bytes`` counts the KV and not the keys (of a block of 32 tokens 200 bytes).
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, that of the retentions' ends."""
        self._index = TierIndex(max_bytes, clock)
        self._blocks: dict[bytes, TierBlock] = {}
        """By digest. What counts for them is in the index."""

    @property
    def usage(self) -> TierUsage:
        return self._index.usage

    def contains(self, key: BlockKey) -> bool:
        block = self._blocks.get(key.digest)
        return block is not None and block.key == key

    def get(self, key: BlockKey) -> TierBlock | None:
        if not self.contains(key):
            return None
        return self._blocks[key.digest]._replace(retention=self._index.use(key.digest))

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        key, content, retention = block
        if self.contains(key):
            self._index.renew(key.digest, retention)
            return ()
        self.remove(key)  # other tokens with the same digest
        given_up = self._index.add(key, content.nbytes, retention)
        self._blocks[key.digest] = block
        return [
            self._blocks.pop(entry.digest)._replace(retention=entry.retention) for entry in given_up
        ]

    def renew(self, key: BlockKey, retention: Retention) -> None:
        if self.contains(key):
            self._index.renew(key.digest, retention)

    def remove(self, key: BlockKey) -> None:
        self._index.remove(key.digest)
        self._blocks.pop(key.digest, None)

    def most_valuable_first(self) -> Iterator[TierBlock]:
        """All blocks, each after those that it follows."""
        for entry in self._index.most_valuable_first():
            yield self._blocks[entry.digest]._replace(retention=entry.retention)
