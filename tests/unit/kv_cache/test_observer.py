"""What an observer hears: full blocks that can be matched, and those that no longer can."""

from __future__ import annotations

from inflight.api import KvCacheConfig
from inflight.kv_cache import BlockRetention, KvCacheManager, ObservedBlock, PrefixIdentity
from tests.unit.kv_cache.helpers import T, extent, run, take_all, tokens
from tests.unit.kv_cache.test_retention import ranges


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[str, ObservedBlock]] = []

    def stored(self, block: ObservedBlock) -> None:
        self.heard.append(("stored", block))

    def removed(self, block: ObservedBlock) -> None:
        self.heard.append(("removed", block))

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
