"""Who holds which block ids, over the life of requests."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.api import KvCacheConfig
from inflight.errors import OutOfBlocksError
from inflight.kv_cache import KvCacheManager, PrefixIdentity
from tests.unit.kv_cache.helpers import (
    counts,
    extent,
    make_kv_cache,
    run,
    table,
    take_all,
    tokens,
)


def test_blocks_are_taken_as_chunks_need_them() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, tail=2)
    kv.open(1)
    assert kv.num_held_blocks(1) == 0 and table(kv, 1) == []

    for start, end, held in ((0, 4, [0]), (4, 7, [0, 1]), (7, 8, [0, 1]), (8, 10, [0, 1, 2])):
        step = [extent(1, ids, start, end)]
        kv.reserve(step)
        assert table(kv, 1) == held
        kv.commit(step)
        kv.check_integrity()
    assert kv.num_held_blocks(1) == 3 and kv.num_free_blocks == 8


def test_generation_takes_a_block_only_at_its_border() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, 30)
    run(kv, 1, ids[:4])
    taken = []
    for end in range(5, 13):
        step = [extent(1, ids, end - 1, end)]
        kv.reserve(step)
        kv.commit(step)
        taken.append(kv.num_held_blocks(1))
    assert taken == [2, 2, 2, 2, 3, 3, 3, 3]


def test_a_full_prefix_is_shared_while_its_owner_runs() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, 30, tail=1))
    kv.open(2)
    other = tokens(10, 20, 70, tail=1)
    assert kv.match_prefix(2, other)[:2] == (8, 2)
    kv.reserve([extent(2, other, 8)])
    assert table(kv, 1) == [0, 1, 2, 3]
    assert table(kv, 2) == [0, 1, 4, 5]
    assert kv.num_free_blocks == 5
    assert kv.num_releasable_blocks(1) == 2 and kv.num_releasable_blocks(2) == 2
    kv.check_integrity()


def test_generated_tokens_become_reusable_too() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, 30)
    run(kv, 1, ids[:4])
    for end in (5, 6, 7, 8):
        step = [extent(1, ids, end - 1, end)]
        kv.reserve(step)
        kv.commit(step)
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, ids)[:2] == (8, 0)


@pytest.mark.parametrize(("length", "reusable"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_match_leaves_a_token_to_compute(length: int, reusable: int) -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, 30))
    kv.open(2)
    assert kv.match_prefix(2, tokens(10, 20, 30)[:length]).num_tokens == reusable


def test_a_match_is_whole_blocks_from_the_start() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, 30))
    for request_id, ids, reusable in (
        (2, tokens(10, 99, 30, tail=1), 4),
        (3, tokens(20, 30, tail=1), 0),
        (4, np.append(tokens(10)[:3], [77, 78]).astype(np.int32), 0),
    ):
        kv.open(request_id)
        assert kv.match_prefix(request_id, ids).num_tokens == reusable


def test_salts_do_not_share() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, tail=1)
    salts = (None, "", "a", "\ud800")  # a lone surrogate is what a hostile JSON may carry
    for request_id, salt in enumerate(salts):
        assert run(kv, request_id, ids, salt) == 0
        kv.close(request_id)
    for request_id, salt in enumerate(salts):
        kv.open(request_id, PrefixIdentity(salt))
        assert kv.match_prefix(request_id, ids).num_tokens == 8


def test_without_reuse_nothing_is_shared_or_kept() -> None:
    kv = make_kv_cache(enable_block_reuse=False)
    ids = tokens(10, 20, tail=1)
    assert run(kv, 1, ids) == 0
    assert run(kv, 2, ids) == 0
    assert table(kv, 1) == [0, 1, 2] and table(kv, 2) == [3, 4, 5]
    kv.close(1)
    assert run(kv, 3, ids) == 0
    assert counts(kv, 3) == (3, 3, 0, 0)
    take_all(kv, 4)
    stats = kv.stats()
    assert stats.evicted_blocks == 0 and stats.cache_hit_rate == 0.0
    kv.open(5)
    with pytest.raises(OutOfBlocksError, match="0 are cached"):
        kv.reserve([extent(5, ids, 4)])


def test_pause_and_resume_replay_what_is_left() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, tail=2)
    run(kv, 1, ids)
    kv.release(1)
    assert table(kv, 1) == [] and kv.num_free_blocks == 11
    kv.check_integrity()

    assert kv.match_prefix(1, ids)[:2] == (8, 0)
    step = [extent(1, ids, 8)]
    kv.reserve(step)
    kv.commit(step)
    assert table(kv, 1) == [0, 1, 2]
    assert counts(kv, 1) == (4, 4, 2, 4)


def test_a_reserve_may_reuse_less_than_it_could() -> None:
    kv = make_kv_cache()
    ids = tokens(10, 20, 30, tail=1)
    run(kv, 1, ids)
    kv.open(2)
    kv.reserve([extent(2, ids, 4, 13)])
    assert table(kv, 2) == [0, 4, 5, 6]


def test_too_large_a_plan_changes_nothing() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, tail=1))
    kv.close(1)
    running = np.arange(300, 332, dtype=np.int32)
    run(kv, 2, running[:14])
    before = (table(kv, 2), kv.stats(), kv.num_free_blocks)

    kv.open(3)
    prompt = tokens(10, 20, 60, 61, tail=1)
    # 4 blocks more for request 2, 2 cached and 3 new ones for request 3, and 7 are free.
    plan = [extent(2, running, 14, 32), extent(3, prompt, 8)]
    with pytest.raises(OutOfBlocksError, match="7 are free"):
        kv.reserve(plan)
    assert (table(kv, 2), kv.stats(), kv.num_free_blocks) == before
    assert table(kv, 3) == [] and kv.match_prefix(3, prompt)[:2] == (8, 0)
    kv.check_integrity()

    kv.reserve([extent(2, running, 14, 24), plan[1]])
    assert kv.num_free_blocks == 0
    assert table(kv, 3)[:2] == [0, 1]
    kv.check_integrity()


def test_what_a_plan_reuses_is_not_evicted_for_its_other_requests() -> None:
    kv = make_kv_cache(num_blocks=4)
    run(kv, 1, tokens(10, 20))  # blocks 0 1
    kv.close(1)
    run(kv, 2, tokens(30, 40))  # blocks 2 3
    kv.close(2)
    kv.open(3)
    kv.open(4)
    # Request 3 comes first, and by age alone it would be given block 1.
    kv.reserve([extent(3, tokens(70)), extent(4, tokens(10, 20, tail=1), 8)])
    assert table(kv, 3) == [3] and table(kv, 4) == [0, 1, 2]
    kv.check_integrity()


def test_a_cached_prefix_shared_by_a_plan_is_counted_once() -> None:
    kv = make_kv_cache(num_blocks=4)
    prompt = tokens(10, 20, tail=1)
    run(kv, 1, prompt)
    kv.close(1)
    kv.open(2)
    kv.open(3)
    kv.reserve([extent(2, prompt, 8), extent(3, prompt, 8)])
    assert table(kv, 2)[:2] == table(kv, 3)[:2] == [0, 1]
    assert kv.num_free_blocks == 0


def test_a_prefix_that_somebody_holds_takes_nothing_from_the_free_blocks() -> None:
    kv = make_kv_cache(num_blocks=3)
    run(kv, 1, tokens(10, 20))
    other = tokens(10, 20, tail=1)
    kv.open(2)
    assert kv.num_free_blocks == 1
    kv.reserve([extent(2, other, 8)])
    assert table(kv, 2)[:2] == table(kv, 1) and kv.num_free_blocks == 0
    kv.check_integrity()


def test_a_plan_that_counts_on_a_lost_prefix_is_refused() -> None:
    kv = make_kv_cache()
    prompt = tokens(10, 20, tail=1)
    run(kv, 1, prompt)
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, prompt).num_tokens == 8
    take_all(kv, 3)
    kv.close(3)
    with pytest.raises(OutOfBlocksError, match="0 are cached"):
        kv.reserve([extent(2, prompt, 8)])
    assert kv.num_free_blocks == 11


def test_only_commit_makes_a_block_reusable() -> None:
    kv = make_kv_cache()
    prompt = tokens(10, 20, 30, tail=1)
    kv.open(1)
    first = [extent(1, prompt, 0, 4)]
    kv.reserve(first)
    kv.commit(first)
    kv.reserve([extent(1, prompt, 4)])  # its forward pass fails: no commit
    kv.open(2)
    assert kv.match_prefix(2, prompt)[:2] == (4, 1)
    kv.close(1)
    assert kv.match_prefix(2, prompt)[:2] == (4, 0)
    kv.check_integrity()


def test_the_table_is_a_read_only_view_that_outgrows_its_array() -> None:
    kv = KvCacheManager(100, KvCacheConfig(tokens_per_block=1))
    ids = np.arange(100, dtype=np.int32)
    run(kv, 1, ids[:1])
    for end in range(2, 101):
        step = [extent(1, ids, end - 1, end)]
        kv.reserve(step)
        kv.commit(step)
    view = kv.block_table(1)
    assert view.dtype == np.int32 and view.tolist() == list(range(100))
    assert np.shares_memory(view, kv.block_table(1))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5


def test_counts_of_the_same_prompt_twice() -> None:
    kv = make_kv_cache()
    prompt = tokens(10, 20, 30, tail=2)
    run(kv, 1, prompt)
    assert counts(kv, 1) == (4, 4, 0, 4)
    run(kv, 2, prompt)
    assert counts(kv, 2) == (1, 1, 3, 1)
    stats = kv.stats()
    assert (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks) == (11, 6, 5)
    assert (stats.alloc_total_blocks, stats.alloc_new_blocks) == (5, 5)
    assert (stats.reused_blocks, stats.missed_blocks, stats.evicted_blocks) == (3, 5, 0)
    assert stats.cache_hit_rate == 3 / 8


def test_an_allocation_that_evicts_is_not_new() -> None:
    kv = make_kv_cache(num_blocks=4)
    run(kv, 1, tokens(10, 20, 30))
    kv.close(1)
    run(kv, 2, tokens(50, 60, 70))
    assert counts(kv, 2) == (3, 1, 0, 3)
    assert kv.stats().evicted_blocks == 2


def test_misuse_is_our_own_bug_and_caught() -> None:
    kv = make_kv_cache()
    with pytest.raises(AssertionError, match="not open"):
        kv.close(1)
    kv.open(1)
    with pytest.raises(AssertionError, match="already open"):
        kv.open(1)
    with pytest.raises(AssertionError):  # nothing was reserved
        kv.commit([extent(1, tokens(10))])
    with pytest.raises(ValueError, match="must be >= 1"):
        KvCacheManager(0, KvCacheConfig())
    kv.check_integrity()
