"""TierIndex: which blocks a tier has, how many bytes they take, and which it gives up next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from inflight.kv_cache.eviction import EvictionOrder, parents_first
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import Retention
from inflight.kv_cache.tiers.storage import TierUsage


class TierEntry:
    """One block of a tier."""

    __slots__ = ("digest", "parent_digest", "num_bytes", "retention", "_num_following")

    def __init__(
        self, key: BlockKey, num_bytes: int, retention: Retention, num_following: Counter[bytes]
    ) -> None:
        """``num_following``: of each block, by its digest, those of the tier that follow it."""
        self.digest = key.digest
        self.parent_digest = key.parent_digest
        self.num_bytes = num_bytes
        self.retention = retention
        self._num_following = num_following

    @property
    def is_leaf(self) -> bool:
        return self.digest not in self._num_following


class TierIndex:
    """The books of one tier, which holds at most ``max_bytes``. Blocks are found by digest.

    What is given up is chosen as in the primary pool (``EvictionOrder``), among the blocks that no
    other of the tier follows: nothing is of use without what stands before it. Not thread-safe.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        """``clock``: seconds, that of the retentions' ends."""
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._entries: dict[bytes, TierEntry] = {}
        self._order: EvictionOrder[TierEntry] = EvictionOrder(clock)
        self._num_following: Counter[bytes] = Counter()
        """Only of blocks that something in ``_order`` follows."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def __iter__(self) -> Iterator[TierEntry]:
        return iter(self._entries.values())

    @property
    def usage(self) -> TierUsage:
        return TierUsage(len(self._entries), self._used_bytes, self._max_bytes)

    def add(self, key: BlockKey, num_bytes: int, retention: Retention) -> Sequence[TierEntry]:
        """A block that is not here. Returns what is not here any more, the least valuable first:
        enough for its bytes, or the block itself where it is worth less than what would have to go,
        or larger than all."""
        assert key.digest not in self._entries
        entry = TierEntry(key, num_bytes, retention, self._num_following)
        if num_bytes > self._max_bytes:
            return (entry,)
        self._entries[key.digest] = entry
        self._used_bytes += num_bytes
        self._enter(entry)
        given_up = []
        while self._used_bytes > self._max_bytes:
            given_up.append(self._order.take())
            self._unfollow(given_up[-1])
            self._forget(given_up[-1])
        return given_up

    def use(self, digest: bytes) -> Retention:
        """The block counts as the one used last, and a duration that is not over begins anew.
        Returns what counts for it now."""
        entry = self._entries[digest]
        if entry in self._order:
            self._order.remove(entry)
            self._order.add(entry)
        return entry.retention

    def renew(self, digest: bytes, retention: Retention) -> None:
        """The block counts as the one used last, with another retention."""
        entry = self._entries[digest]
        if entry in self._order:
            self._order.remove(entry)
            entry.retention = retention
            self._order.add(entry)

    def retention_of(self, digest: bytes) -> Retention:
        return self._entries[digest].retention

    def pin(self, digest: bytes) -> None:
        """The block is not given up any more, whatever comes. One that is not here is ignored."""
        entry = self._entries.get(digest)
        if entry is not None and entry in self._order:
            self._leave(entry)

    def remove(self, digest: bytes) -> None:
        """One that is not here is ignored."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        if entry in self._order:
            self._leave(entry)
        self._forget(entry)

    def most_valuable_first(self) -> Iterator[TierEntry]:
        """Those that may be given up, in the reverse of their order, each after those that it
        follows."""
        order = self._order.most_valuable_first()
        return parents_first(order, lambda entry: self._entries.get(entry.parent_digest))

    def _enter(self, entry: TierEntry) -> None:
        self._num_following[entry.parent_digest] += 1
        self._order.add(entry)

    def _leave(self, entry: TierEntry) -> None:
        self._order.remove(entry)
        self._unfollow(entry)

    def _unfollow(self, entry: TierEntry) -> None:
        self._num_following[entry.parent_digest] -= 1
        if self._num_following[entry.parent_digest] == 0:
            del self._num_following[entry.parent_digest]
            parent = self._entries.get(entry.parent_digest)
            if parent is not None:
                self._order.became_leaf(parent)

    def _forget(self, entry: TierEntry) -> None:
        del self._entries[entry.digest]
        self._used_bytes -= entry.num_bytes
