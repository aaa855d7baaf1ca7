"""What an observer hears: full blocks that can be matched, and those that no longer can."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.api import KvCacheConfig
from inflight.errors import IntegrityError
from inflight.kv_cache import BlockRetention, KvCacheManager, ObservedBlock, PrefixIdentity
from inflight.kv_cache.retention import DEFAULT_RETENTION
from tests.unit.kv_cache.helpers import T, extent, run, take_all, tokens
from tests.unit.kv_cache.test_retention import ranges


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[str, ObservedBlock]] = []
        self.num_removals = 0
        """Times that something was told as removed."""

    def stored(self, block: ObservedBlock) -> None:
        self.heard.append(("stored", block))

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        self.num_removals += 1
        self.heard += [("removed", block) for block in blocks]

    def summary(self) -> list[tuple[str, int]]:
        return [(what, block.block_id) for what, block in self.heard]


def make(num_blocks: int = 11) -> tuple[KvCacheManager, Recorder]:
    recorder = Recorder()
    config = KvCacheConfig(tokens_per_block=T)
    return KvCacheManager(num_blocks, config, observers=[recorder]), recorder


def test_full_blocks_are_told_with_their_place_as_soon_as_they_are_written() -> None:
    kv, recorder = make()
    run(kv, 1, tokens(10, 20, tail=2), "salt")
    kv.close(1)
    (_, first), (_, second) = recorder.heard
    assert recorder.summary() == [("stored", 0), ("stored", 1)], "and no part"
    assert first.parent_digest is None and second.parent_digest == first.key.digest
    assert first.root_digest == second.root_digest == PrefixIdentity("salt").root_digest()
    assert second.key.token_ids == tokens(20).tobytes()


def test_a_block_that_is_reused_or_computed_again_is_not_told_again() -> None:
    kv, recorder = make()
    run(kv, 1, tokens(10, 20))
    kv.close(1)
    run(kv, 2, tokens(10, 20, tail=1))
    kv.close(2)
    twins = [extent(3, tokens(10)), extent(4, tokens(10))]
    for request_id in (3, 4):
        kv.open(request_id)
    kv.reserve(twins)
    kv.commit(twins)
    assert recorder.summary() == [("stored", 0), ("stored", 1)]


def test_an_evicted_block_is_told_with_its_priority_before_it_has_another_owner() -> None:
    kv, recorder = make(num_blocks=3)
    ids = tokens(10, 20)
    kv.open(1, retention=BlockRetention(ranges((0, 4, 90, None)), 8))
    kv.reserve([extent(1, ids)])
    kv.commit([extent(1, ids)])
    kv.close(1)
    recorder.heard.clear()
    take_all(kv, 2)
    assert recorder.summary() == [("removed", 1), ("removed", 0)]
    assert recorder.num_removals == 1, "what one plan evicts is told at once"
    assert [block.retention.priority for _, block in recorder.heard] == [35, 90]
    assert [block.key.token_ids for _, block in recorder.heard] == [
        tokens(20).tobytes(),
        tokens(10).tobytes(),
    ]


def test_a_block_that_is_taken_over_is_told_as_removed() -> None:
    kv, recorder = make(num_blocks=1)
    run(kv, 1, tokens(10))
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, tokens(10)).num_tokens == 3
    kv.reserve([extent(2, tokens(10), 3)])
    assert recorder.summary() == [("stored", 0), ("removed", 0)]


def test_blocks_that_are_onboarded_are_written_after_others_heard_of_the_room_for_them() -> None:
    kv, recorder = make(num_blocks=3)
    run(kv, 1, tokens(10, 20))
    kv.close(1)
    kv.open(2)
    heard_before_writing: list[tuple[str, int]] = []
    recorder.heard.clear()
    number = kv.onboard(
        2,
        tokens(30, 40, tail=1),
        [DEFAULT_RETENTION] * 2,
        lambda block_ids: heard_before_writing.extend(recorder.summary()),
    )
    assert number == 2 and recorder.num_removals == 1
    assert heard_before_writing == [("removed", 1)]
    assert recorder.summary() == [("removed", 1), ("stored", 2), ("stored", 1)]


def test_books_with_evictions_that_nobody_heard_of_do_not_add_up() -> None:
    kv, recorder = make(num_blocks=1)
    run(kv, 1, tokens(10))
    kv.close(1)
    block = kv._pool.allocate()
    kv._pool.release(block)
    with pytest.raises(IntegrityError, match="observers have not heard"):
        kv.check_integrity()
    kv._pool.tell_removed()
    kv.check_integrity()
    assert recorder.summary() == [("stored", 0), ("removed", 0)]
