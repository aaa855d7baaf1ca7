"""HostStorage: the tier in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.storage import BlockContent, TierBlock, TierUsage


class HostStorage:
    """A TierStorage; blocks are kept as they come, no byte is copied. Not thread-safe.

    ``max_bytes`` counts the KV and not the keys (of a block of 32 tokens 200 bytes).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._blocks: OrderedDict[bytes, TierBlock] = OrderedDict()
        """By digest, the one used last at the end."""

    @property
    def usage(self) -> TierUsage:
        return TierUsage(len(self._blocks), self._used_bytes, self._max_bytes)

    def contains(self, key: BlockKey) -> bool:
        block = self._blocks.get(key.digest)
        return block is not None and block.key == key

    def get(self, key: BlockKey) -> BlockContent | None:
        if not self.contains(key):
            return None
        self._blocks.move_to_end(key.digest)
        return self._blocks[key.digest].content

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        if self.contains(block.key):
            self._blocks.move_to_end(block.key.digest)
            return ()
        if block.content.nbytes > self._max_bytes:
            return (block,)
        self.remove(block.key)  # other tokens with the same digest
        given_up = []
        while self._used_bytes + block.content.nbytes > self._max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self._used_bytes -= oldest.content.nbytes
            given_up.append(oldest)
        self._blocks[block.key.digest] = block
        self._used_bytes += block.content.nbytes
        return given_up

    def newest_first(self) -> Iterator[TierBlock]:
        """All blocks, the one used last first."""
        return reversed(self._blocks.values())

    def remove(self, key: BlockKey) -> None:
        block = self._blocks.pop(key.digest, None)
        if block is not None:
            self._used_bytes -= block.content.nbytes
