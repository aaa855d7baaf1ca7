"""What a real KV cache tells the queue, and what the queue does when nobody takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import KvCacheConfig
from inflight.api.kv_pools import KvGroup, KvPool
from inflight.kv_cache import KvCacheManager, KvCachePools, PrefixIdentity
from inflight.kv_events.announcer import Announcer
from inflight.kv_events.changes import Change, ChangeQueue, TierObserver
from inflight.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from tests.unit.kv_cache.helpers import T, extent, run, take_all, tokens
from tests.unit.kv_events.helpers import cache_with_queue


def summary(changes: list[Change]) -> list[tuple[bool, bytes]]:
    return [(change.is_stored, change.block.token_ids) for change in changes]


def test_full_blocks_are_told_in_order_and_evicted_ones_children_first() -> None:
    kv, queue = cache_with_queue(num_blocks=2)
    run(kv, 1, tokens(10, 20))
    kv.close(1)
    assert summary(queue.take().changes) == [
        (True, tokens(10).tobytes()),
        (True, tokens(20).tobytes()),
    ]
    take_all(kv, 2)
    assert summary(queue.take().changes) == [
        (False, tokens(20).tobytes()),
        (False, tokens(10).tobytes()),
    ]


@pytest.mark.parametrize(
    "identity",
    [
        PrefixIdentity("a tenant's salt"),
        PrefixIdentity(lora_task_id=7),
        PrefixIdentity(extra_ids=np.ones(1, dtype=np.uint64)),
    ],
    ids=["salt", "adapter", "image"],
)
def test_blocks_that_a_consumer_would_take_for_others_are_not_told(
    identity: PrefixIdentity,
) -> None:
    kv, queue = cache_with_queue(num_blocks=4)
    step = [extent(1, tokens(10, 20))]
    kv.open(1, identity)
    kv.reserve(step)
    kv.commit(step)
    kv.close(1)
    take_all(kv, 2)
    assert queue.take() == ([], None)


def test_a_full_queue_drops_counts_and_then_gives_the_whole_state() -> None:
    kv, queue = cache_with_queue(num_blocks=6, max_queued=3)
    run(kv, 1, tokens(1, 2, 3, 4, 5))
    kv.close(1)
    assert queue.num_dropped == 5
    changes, all_blocks = queue.take()
    assert changes == [] and all_blocks is not None
    assert [block.token_ids[:4] for block in all_blocks] == [
        n.to_bytes(4, "little") for n in (1, 2, 3, 4, 5)
    ]
    assert queue.take() == ([], None), "and goes on as before"


def test_a_closed_queue_ends_the_wait() -> None:
    queue = ChangeQueue()
    queue.close()
    assert queue.wait() is False


class Consumer:
    """A router's view: hashes it believes to be cached; refuses orphans, as real ones do."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def hear(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.known
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.known.update(event.block_hashes)
            else:
                assert self.known.issuperset(event.block_hashes)
                self.known.difference_update(event.block_hashes)


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_a_consumer_always_ends_with_what_the_cache_holds(
    program: list[tuple[list[int], bool]], max_queued: int
) -> None:
    """Requests run and evict each other; the queue is taken now and then, and may overflow."""
    kv, queue = cache_with_queue(num_blocks=5, max_queued=max_queued)
    announcer, consumer = Announcer(T), Consumer()

    def publish() -> None:
        changes, all_blocks = queue.take()
        if all_blocks is not None:
            changes = announcer.changes_to(all_blocks)
        consumer.hear(announcer.events(changes))

    cached: set[tuple[int, ...]] = set()
    for request_id, (prompt, is_taken) in enumerate(program):
        run(kv, request_id, tokens(*prompt))
        kv.close(request_id)
        cached.add(tuple(prompt))
        if is_taken:
            publish()
    publish()
    assert len(consumer.known) == sum(_is_cached(kv, prefix) for prefix in _prefixes(cached))


def _prefixes(prompts: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}


def _is_cached(kv: KvCacheManager, prefix: tuple[int, ...]) -> bool:
    kv.open(1000)
    match = kv.match_prefix(1000, tokens(*prefix, tail=1))
    kv.close(1000)
    return match.num_tokens >= len(prefix) * T


@settings(max_examples=100, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=12), st.booleans())
def test_of_several_pools_each_is_told_or_the_first_alone(
    program: list[list[int]], all_pools: bool
) -> None:
    """Blocks that a window has lost are gone from its group, and the first one still has them."""
    queue = ChangeQueue()
    pools = [KvPool(KvGroup(None, (), 1), 9), KvPool(KvGroup(6, (), 1), 5)]
    observer = TierObserver(queue, "GPU", all_pools=all_pools)
    kv = KvCachePools(pools, KvCacheConfig(tokens_per_block=T), observers=[observer])
    announcer = Announcer(T)
    known: set[tuple[int | None, int]] = set()
    for request_id, prompt in enumerate(program):
        run(kv, request_id, tokens(*prompt))
        kv.close(request_id)
        for event in announcer.events(queue.take().changes):
            assert isinstance(event, BlockStored | BlockRemoved)
            index = None if event.group is None else event.group.number
            hashes = {(index, each) for each in event.block_hashes}
            if isinstance(event, BlockStored):
                assert known.isdisjoint(hashes)
                known |= hashes
            else:
                assert known >= hashes
                known -= hashes
    told = kv.pools if all_pools else kv.pools[:1]
    assert known == {
        (index if all_pools else None, int.from_bytes(key.digest[-8:], "big"))
        for index, pool in enumerate(told)
        for _, key, _ in pool.cached_blocks()
    }
