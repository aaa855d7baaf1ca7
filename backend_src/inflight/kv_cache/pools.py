"""KvCachePools: the books of a model whose layers have different windows, one pool for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from inflight.api.executor_config import KvCacheConfig
from inflight.api.kv import PrefixMatch
from inflight.api.kv_pools import KvPool
from inflight.api.stats import KvCacheStats
from inflight.errors import IntegrityError
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.identity import BlockKey, PrefixIdentity
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.observer import BlockObserver
from inflight.kv_cache.prefix import ReusablePrefix
from inflight.kv_cache.reservation import NO_COPIES, BlockCopies
from inflight.kv_cache.retention import BlockRetention
from inflight.kv_cache.sequence import RequestCounts


class KvCachePools:
    """Two or more pools in step: what ``KvCacheManager`` promises of one, of all of them at once.

    A request has a table in each pool. A beginning of it is reusable where every pool can reuse it,
    whole blocks and the part after them; layers without a window, which keep everything, come first
    where there are any. ``observers`` hear of all pools.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        config: KvCacheConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[BlockObserver] = (),
    ) -> None:
        assert len(pools) > 1, "one pool is a KvCacheManager"
        self._pools = tuple(
            KvCacheManager(
                num_blocks,
                config,
                window=group.window,
                number=number,
                clock=clock,
                observers=observers,
            )
            for number, (group, num_blocks) in enumerate(pools)
        )

    @property
    def pools(self) -> Sequence[KvCacheManager]:
        return self._pools

    @property
    def tokens_per_block(self) -> int:
        return self._pools[0].tokens_per_block

    @property
    def num_blocks(self) -> int:
        """Of all pools together."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def num_free_blocks(self) -> int:
        """Of all pools together."""
        return sum(pool.num_free_blocks for pool in self._pools)

    def open(
        self,
        request_id: int,
        identity: PrefixIdentity | None = None,
        retention: BlockRetention | None = None,
    ) -> None:
        keys: list[BlockKey] = []
        for pool in self._pools:
            pool.open(request_id, identity, retention, keys=keys)

    def fork(self, request_id: int, child_ids: Iterable[int]) -> None:
        child_ids = list(child_ids)
        for pool in self._pools:
            pool.fork(request_id, child_ids)

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        """The longest beginning that all pools can reuse."""
        matches = [pool.match_prefix(request_id, token_ids) for pool in self._pools]
        size = self.tokens_per_block
        prefixes: list[ReusablePrefix] = []

        def common_blocks(most: int) -> int:
            prefixes.clear()
            for pool in self._pools:
                prefixes.append(pool.beginning(request_id, token_ids, most))
                most = prefixes[-1].num_blocks
            return most

        def common_part(most: int) -> int:
            for pool, prefix in zip(self._pools, prefixes, strict=True):
                most = pool.num_part_tokens(request_id, token_ids, prefix, most)
            return most

        num_blocks = _settled(common_blocks, min(match.num_tokens for match in matches) // size)
        num_part = _settled(common_part, size)
        return PrefixMatch(
            num_blocks * size + num_part,
            # Who holds a block of the first pool holds those before it, or there is no credit.
            min(matches[0].num_referenced_blocks, num_blocks),
            self._pools[0].name_of_block(request_id, token_ids, num_blocks),
        )

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        return self._pools[0].next_block(request_id, token_ids)

    def reserve(self, extents: Iterable[KvExtent]) -> BlockCopies:
        """In all pools or in none."""
        extents = list(extents)
        plans = [pool.plan(extents) for pool in self._pools]
        first, *further = (
            NO_COPIES if plan is None else pool.carry_out(plan)
            for pool, plan in zip(self._pools, plans, strict=True)
        )
        return first._replace(further=tuple(further))

    def commit(self, extents: Iterable[KvExtent]) -> None:
        extents = list(extents)
        for pool in self._pools:
            pool.commit(extents)

    def release(self, request_id: int) -> None:
        for pool in self._pools:
            pool.release(request_id)

    def close(self, request_id: int) -> None:
        for pool in self._pools:
            pool.close(request_id)

    def request_counts(self, request_id: int) -> RequestCounts:
        """Blocks of all pools were allocated; reused and missed are counted in the first."""
        counts = [pool.request_counts(request_id) for pool in self._pools]
        return counts[0]._replace(
            alloc_total=sum(count.alloc_total for count in counts),
            alloc_new=sum(count.alloc_new for count in counts),
        )

    def stats(self) -> KvCacheStats:
        """Blocks of all pools together; reused and missed are counted in the first."""
        stats = [pool.stats() for pool in self._pools]

        def total(name: str) -> int:
            return sum(getattr(each, name) for each in stats)

        return replace(
            stats[0],
            max_num_blocks=total("max_num_blocks"),
            free_num_blocks=total("free_num_blocks"),
            used_num_blocks=total("used_num_blocks"),
            alloc_total_blocks=total("alloc_total_blocks"),
            alloc_new_blocks=total("alloc_new_blocks"),
            evicted_blocks=total("evicted_blocks"),
        )

    def check_integrity(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """That of each pool, and that they agree; raises IntegrityError."""
        for pool in self._pools:
            pool.check_integrity(goes_on)
        if len({tuple(pool.lengths()) for pool in self._pools}) > 1:
            raise IntegrityError("the pools differ in which requests are open, or how far they are")


def _settled(shorten: Callable[[int], int], longest: int) -> int:
    """What every pool agrees to: ``shorten`` asks each in turn for at most so much."""
    while True:
        agreed = shorten(longest)
        if agreed == longest:
            return agreed
        longest = agreed


KvCache = KvCacheManager | KvCachePools
"""The books of a model, whatever its layers are like."""


def make_kv_cache(
    pools: Sequence[KvPool],
    config: KvCacheConfig,
    *,
    clock: Callable[[], float],
    observers: Sequence[BlockObserver],
) -> KvCache:
    """For the pools of a model, at least one; see KvCacheManager and KvCachePools."""
    if len(pools) > 1:
        return KvCachePools(pools, config, clock=clock, observers=observers)
    group, num_blocks = pools[0]
    return KvCacheManager(num_blocks, config, window=group.window, clock=clock, observers=observers)
