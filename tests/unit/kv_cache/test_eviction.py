"""Which cached blocks go, and in which order; and equal blocks that were computed twice."""

from __future__ import annotations

from random import Random

import pytest

from inflight.kv_cache import BlockRetention
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import RadixTree
from tests.unit.kv_cache.helpers import extent, make_kv_cache, run, table, take_all, tokens
from tests.unit.kv_cache.test_retention import ranges


def test_empty_blocks_go_first_then_the_oldest_release_tail_first() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, 30))  # blocks 0 1 2
    run(kv, 2, tokens(40, 50, tail=1))  # blocks 3 4 5, the last one not full
    run(kv, 3, tokens(60))  # block 6
    for request_id in (2, 1, 3):
        kv.close(request_id)
    assert take_all(kv, 4) == [5, 7, 8, 9, 10, 4, 3, 2, 1, 0, 6]
    assert kv.stats().evicted_blocks == 6
    kv.check_integrity()


def test_reuse_makes_a_block_young_again() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, tail=1))  # blocks 0 1 2
    kv.close(1)
    run(kv, 2, tokens(40, 50))  # blocks 2 3
    kv.close(2)
    run(kv, 3, tokens(10, 70))  # blocks 0 (reused) and 4
    kv.close(3)
    assert take_all(kv, 4)[-5:] == [1, 3, 2, 4, 0]


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_value_is_that_of_eviction_reversed(seed: int) -> None:
    """Of random trees of prompts with random priorities, released in random order."""
    rng = Random(seed)
    kv = make_kv_cache(num_blocks=60)
    for request_id in range(8):
        ids = tokens(*rng.choices((10, 20, 30), k=rng.randint(1, 6)), tail=rng.randint(0, 1))
        priority = rng.choice((10, 35, 90))
        kv.open(request_id, retention=BlockRetention(ranges((0, None, priority, None)), len(ids)))
        start = kv.match_prefix(request_id, ids).num_tokens
        step = [extent(request_id, ids, start)]
        kv.reserve(step)
        kv.commit(step)
    for request_id in rng.sample(range(8), k=8):
        kv.close(request_id)
    by_value = [block_id for block_id, _, _ in kv.cached_blocks()]
    kv.check_integrity()
    assert take_all(kv, 9)[-len(by_value) :] == by_value[::-1]


def test_an_inner_block_outlives_every_branch_below_it() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20))
    run(kv, 2, tokens(10, 30))
    run(kv, 3, tokens(10, 40))
    kv.close(1)
    assert kv.num_releasable_blocks(2) == 1
    kv.close(3)
    kv.close(2)
    assert take_all(kv, 4)[-4:] == [1, 3, 2, 0]


def test_an_evicted_prefix_is_shortened_from_its_end() -> None:
    kv = make_kv_cache(num_blocks=4)
    run(kv, 1, tokens(10, 20, 30))
    kv.close(1)
    run(kv, 2, tokens(50, 60))
    kv.open(3)
    assert kv.match_prefix(3, tokens(10, 20, 30, tail=1))[:2] == (8, 0)
    kv.check_integrity()


def test_equal_blocks_computed_at_once_stay_private() -> None:
    kv = make_kv_cache()
    prompts = {1: tokens(10, 20, 30), 2: tokens(10, 20, 70)}
    for request_id in prompts:
        kv.open(request_id)
    plan = [extent(request_id, ids) for request_id, ids in prompts.items()]
    kv.reserve(plan)
    kv.commit(plan)
    kv.check_integrity()
    assert table(kv, 1) == [0, 1, 2] and table(kv, 2) == [3, 4, 5]
    assert kv.num_releasable_blocks(1) == 3 and kv.num_releasable_blocks(2) == 3

    # The tree finds the first one's blocks, and the second one's own block under them.
    kv.open(3)
    assert kv.match_prefix(3, tokens(10, 20, 70, tail=1))[:2] == (12, 3)
    kv.reserve([extent(3, tokens(10, 20, 70, tail=1), 12)])
    assert table(kv, 3) == [0, 1, 5, 6]
    kv.check_integrity()


def test_a_copy_takes_over_when_the_block_that_matches_found_is_given_back() -> None:
    kv = make_kv_cache()
    plan = [extent(1, tokens(10, 20)), extent(2, tokens(10, 70))]
    kv.open(1)
    kv.open(2)
    kv.reserve(plan)
    kv.commit(plan)
    kv.close(1)
    kv.check_integrity()
    kv.open(3)
    assert kv.match_prefix(3, tokens(10, 70, tail=1))[:2] == (8, 2)
    kv.reserve([extent(3, tokens(10, 70, tail=1), 8)])
    assert table(kv, 3) == [2, 3, 0]  # block 0 was the first one's and is empty since
    kv.check_integrity()


def test_a_copy_given_back_first_is_empty_at_once() -> None:
    kv = make_kv_cache()
    plan = [extent(1, tokens(10)), extent(2, tokens(10))]
    kv.open(1)
    kv.open(2)
    kv.reserve(plan)
    kv.commit(plan)
    kv.close(2)
    kv.close(1)
    kv.check_integrity()
    assert take_all(kv, 3) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]


def test_recomputing_the_last_block_replaces_the_cached_one() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20))
    kv.close(1)
    assert run(kv, 2, tokens(10, 20)) == 4
    assert table(kv, 2) == [0, 2]
    assert kv.num_free_blocks == 9
    assert take_all(kv, 3)[0] == 1  # the one that was cached before is empty now


def test_a_digest_is_believed_only_with_its_tokens() -> None:
    tree = RadixTree(tokens_per_block=2)
    pool = BlockPool(3, tree, clock=lambda: 0.0)
    first, second = pool.allocate(), pool.allocate()
    root = tree.root(b"root")
    assert pool.commit(first, root, BlockKey(b"same digest", b"root", b"8 bytes."), None)
    for others in (
        BlockKey(b"same digest", b"root", b"otherwise"[:8]),
        BlockKey(b"same digest", b"root", b"8 bytes.", extra_ids=b"an image"),
    ):
        assert tree.match(tree.root(b"root"), [others]) == []
        assert not pool.commit(second, tree.root(b"root"), others, None)
    assert second.node is None
    pool.release(second)
    assert [block.block_id for block in pool.empty_blocks] == [2, 1]
