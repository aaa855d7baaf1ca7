"""KvTiers: what the engine sees of the tiers. Evicted blocks go down, wanted ones come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from inflight.api.executor_config import KvCachePausePolicy
from inflight.api.stats import KvOnboardingStats, KvTierStats
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.observer import ObservedBlock
from inflight.kv_cache.tiers.cascade import Place, TierCascade
from inflight.kv_cache.tiers.cost import OnboardCost
from inflight.kv_cache.tiers.loading import Load
from inflight.kv_cache.tiers.moving import BlockMemory, BlockMover, NotWrittenError
from inflight.kv_cache.tiers.storage import LazyBlock, TierBlock

logger = logging.getLogger(__name__)

MAX_LOADS = 4
"""Requests that wait for the disk at once; it reads for one after the other."""
LONGEST_UNMEASURED_LOAD = 1.0
"""Seconds that a request waits for the disk while nobody knows what computing would take."""


class KvTiers:
    """On the engine thread, between two forwards. A BlockObserver: what is evicted for an iteration
    is copied at once, before its slots are written.

    Onboarding puts blocks back into the cache, held by nobody, where the next ``match_prefix``
    finds them: the scheduler and ``reserve`` know nothing of tiers.
    """

    def __init__(
        self,
        cascade: TierCascade,
        memory: BlockMemory,
        cost: OnboardCost,
        *,
        pause_policy: KvCachePausePolicy,
        onboards: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``onboards`` False: blocks are offloaded and never brought back."""
        self.cascade = cascade
        self.cost = cost
        self._mover = BlockMover(memory, cost.block_bytes, clock)
        self._pause_policy = pause_policy
        self._onboards = onboards
        self._clock = clock
        self._loads: dict[int, Load] = {}
        """By request; its blocks come from the disk."""
        self._given_up: set[int] = set()
        """Requests that are not asked for again: they have got what they get."""
        self._num_offloaded = 0
        self._num_onboarded = dict.fromkeys(Place, 0)
        self._num_recomputed = 0
        self._num_late_loads = 0

    @property
    def moving_seconds(self) -> float:
        """Clock seconds that blocks took on their way out of the primary pool and into it, since
        the start. It is the engine thread's time."""
        return self._mover.seconds

    # Down.

    def stored(self, block: ObservedBlock) -> None:
        """Nothing is copied before it must be."""

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        new = []
        for block in blocks:
            if self.cascade.place_of(block.key) is None:
                new.append(block)
            else:
                self.cascade.renew(block.key, block.retention)
        contents = self._mover.read([block.block_id for block in new])
        for block, content in zip(new, contents, strict=True):
            if content is not None:
                self._num_offloaded += 1
                self.cascade.put(TierBlock(block.key, content, block.retention))

    def close(self, timeout: float, kv: KvCacheManager | None) -> None:
        """Ends the threads within about ``timeout`` seconds. Where blocks outlive the process, what
        ``kv`` has cached is written first; None: nothing that is in the pool is to be trusted."""
        cached: Iterator[LazyBlock] = iter(())
        if kv is not None:
            cached = (
                LazyBlock(key, retention, partial(self._mover.read_one, block_id))
                for block_id, key, retention in kv.cached_blocks()
            )
        self.cascade.close(timeout, cached)

    # Back.

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def wait(self, timeout: float) -> None:
        """Until further blocks of a request are there, ``timeout`` seconds at most."""
        # One that is done may belong to a request for which there is no room yet.
        unfinished = [load for load in self._loads.values() if not load.is_done]
        if unfinished:
            self.cascade.wait_for_any(unfinished, timeout)

    def prepare(
        self, kv: KvCacheManager, request_id: int, token_ids: npt.NDArray[np.int32], *, paused: bool
    ) -> bool:
        """Before a waiting request is scheduled. False: it waits for blocks from the disk.

        ``token_ids``: int32[n], all it has. ``paused``: it held blocks before.
        """
        if not self._onboards or request_id in self._given_up:
            return True
        load = self._loads.get(request_id)
        if load is not None:
            if load.is_done:
                self._finish_load(kv, request_id, token_ids)
                return True
            must_wait = paused and self._pause_policy is KvCachePausePolicy.OFFLOAD
            return not must_wait and self._is_too_late(request_id, load)
        keys, places = self._found(kv.missing_blocks(request_id, token_ids))
        if not keys:
            return True
        number = self._num_to_onboard(places, paused)
        if number == 0:
            self._num_recomputed += 1
            self._given_up.add(request_id)
            return True
        places = places[:number]
        num_near = places.index(Place.DISK) if Place.DISK in places else number
        self._onboard_from_host(kv, request_id, token_ids, keys[:num_near])
        if num_near == number:
            return True
        if len(self._loads) < MAX_LOADS:
            self._loads[request_id] = self.cascade.load(keys[num_near:number], self._clock())
        return False

    def forget_all_but(self, request_ids: Iterable[int]) -> None:
        """``request_ids``: all that are queued. Others wait no more: they have started, or ended.
        Reads them only where there is something to forget."""
        if not self._loads and not self._given_up:
            return
        queued = set(request_ids)
        for request_id in self._loads.keys() - queued:
            self._loads.pop(request_id).is_cancelled = True
        self._given_up &= queued

    def _found(self, missing: Sequence[BlockKey]) -> tuple[list[BlockKey], list[Place]]:
        """The first of the missing blocks, as far as a tier has all of them."""
        keys, places = [], []
        for key in missing:
            place = self.cascade.place_of(key)
            if place is None:
                break
            keys.append(key)
            places.append(place)
        return keys, places

    def _num_to_onboard(self, places: Sequence[Place], paused: bool) -> int:
        if paused and self._pause_policy is not KvCachePausePolicy.AUTO:
            return len(places) if self._pause_policy is KvCachePausePolicy.OFFLOAD else 0
        return self.cost.num_worthwhile(places)

    def _onboard_from_host(
        self,
        kv: KvCacheManager,
        request_id: int,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
    ) -> None:
        # All are looked up before the first is written: that may evict, and push out of the tier.
        blocks = []
        for key in keys:
            block = self.cascade.find(key)
            if block is None:
                break
            blocks.append(block)
        self._onboard(kv, request_id, token_ids, Place.HOST, blocks)

    def _finish_load(
        self, kv: KvCacheManager, request_id: int, token_ids: npt.NDArray[np.int32]
    ) -> None:
        load = self._loads.pop(request_id)
        self._given_up.add(request_id)  # what is there by now is all that it waits for
        missing = kv.missing_blocks(request_id, token_ids)
        # Another request may have computed the first ones meanwhile; then they are not missing.
        # Where what stood before them is gone, none of them is of use.
        is_continued = bool(missing) and missing[0] in load.keys
        first = load.keys.index(missing[0]) if is_continued else len(load.blocks)
        self.cost.bandwidth[Place.DISK].observe(_num_bytes(load.blocks), load.seconds)
        self._onboard(kv, request_id, token_ids, Place.DISK, load.blocks[first:])
        for block in load.blocks:
            self.cascade.put(block)

    def _is_too_late(self, request_id: int, load: Load) -> bool:
        """A request waits no longer than computing the tokens would take."""
        waited = self._clock() - load.began
        longest = self.cost.seconds_to_compute(len(load.keys))
        if waited <= (LONGEST_UNMEASURED_LOAD if longest is None else longest):
            return False
        load.is_cancelled = True
        del self._loads[request_id]
        self._given_up.add(request_id)
        self._num_late_loads += 1
        self.cost.bandwidth[Place.DISK].observe(self.cost.block_bytes * len(load.keys), waited)
        return True

    def _onboard(
        self,
        kv: KvCacheManager,
        request_id: int,
        token_ids: npt.NDArray[np.int32],
        place: Place,
        blocks: Sequence[TierBlock],
    ) -> None:
        """Into the primary pool. The time it takes, offloading what has to go for it included, is
        the cost of host memory."""
        if not blocks:
            return
        began = self._clock()
        retentions = [block.retention.used(began) for block in blocks]
        write = partial(self._mover.write, contents=[block.content for block in blocks])
        try:
            number = kv.onboard(request_id, token_ids, retentions, write)
        except NotWrittenError as error:
            logger.error("KV blocks were not onboarded", exc_info=error.__cause__)
            self._given_up.add(request_id)
            return
        self._num_onboarded[place] += number
        self.cost.bandwidth[Place.HOST].observe(_num_bytes(blocks[:number]), self._clock() - began)

    def stats(self) -> tuple[KvTierStats, ...]:
        """Of each tier, the nearest first. Safe from any thread."""
        host, disk = self.cascade.host, self.cascade.disk
        block_bytes = self.cost.block_bytes
        onboarded = {place: block_bytes * number for place, number in self._num_onboarded.items()}
        tiers = []
        if host is not None:
            tiers.append(
                KvTierStats(
                    tier=Place.HOST.value,
                    offloaded_bytes=self._num_offloaded * block_bytes,
                    onboarded_bytes=onboarded[Place.HOST],
                    **host.usage._asdict(),
                )
            )
        if disk is not None:
            # Without a host tier, what is found in host memory is on its way to the disk.
            waiting = onboarded[Place.HOST] if host is None else 0
            tiers.append(
                KvTierStats(
                    tier=Place.DISK.value,
                    offloaded_bytes=disk.written_bytes,
                    onboarded_bytes=onboarded[Place.DISK] + waiting,
                    dropped_blocks=self.cascade.num_dropped,
                    io_errors=disk.num_io_errors,
                    bad_files=disk.num_bad_files,
                    **disk.usage._asdict(),
                )
            )
        return tuple(tiers)

    def onboarding_stats(self) -> KvOnboardingStats:
        """Safe from any thread."""
        bandwidth = self.cost.bandwidth
        return KvOnboardingStats(
            recompute_decisions=self._num_recomputed,
            late_loads=self._num_late_loads,
            host_bytes_per_second=bandwidth[Place.HOST].per_second,
            disk_bytes_per_second=bandwidth[Place.DISK].per_second,
            context_tokens_per_second=self.cost.context.per_second,
        )


def _num_bytes(blocks: Sequence[TierBlock]) -> int:
    return sum(block.content.nbytes for block in blocks)
