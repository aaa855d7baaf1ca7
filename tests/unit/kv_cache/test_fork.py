"""Several sequences of one prompt: full blocks stay shared, the last one is copied on write."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.api import KvCacheConfig
from inflight.errors import OutOfBlocksError
from inflight.kv_cache import KvCacheManager, KvExtent
from inflight.scheduler.capacity import MaxUtilization
from tests.unit.kv_cache.helpers import counts, extent, make_kv_cache, run, table, tokens
from tests.unit.kv_cache.test_partial_reuse import pairs
from tests.unit.scheduler.simulated_engine import forked, make_request


def grown(ids: np.ndarray, *more: int) -> np.ndarray:
    return np.append(ids, more).astype(np.int32)


@pytest.fixture(params=[True, False], ids=["reuse", "no reuse"])
def kv(request: pytest.FixtureRequest) -> KvCacheManager:
    """Request 1 has written six tokens in blocks 0 and 1."""
    cache = make_kv_cache(enable_block_reuse=request.param, enable_partial_reuse=True)
    run(cache, 1, tokens(10, tail=2))
    return cache


def test_a_fork_holds_the_same_blocks_and_takes_none(kv: KvCacheManager) -> None:
    kv.fork(1, [2, 3])
    assert table(kv, 1) == table(kv, 2) == table(kv, 3) == [0, 1]
    assert kv.num_free_blocks == 9
    assert kv.num_releasable_blocks(2) == 0
    assert counts(kv, 2) == (0, 0, 0, 0)
    kv.check_integrity()


def test_all_but_the_last_holder_get_a_copy_when_they_write_on(kv: KvCacheManager) -> None:
    prompt = tokens(10, tail=2)
    kv.fork(1, [2, 3])
    assert [kv.num_new_blocks(i, 7) for i in (1, 2, 3)] == [1, 1, 1]
    assert kv.num_new_blocks(2, 9) == 2
    step = [extent(i, grown(prompt, 50 + i), 6) for i in (1, 2, 3)]
    assert pairs(kv.reserve(step)) == [(1, 2), (1, 3)]
    assert [table(kv, i) for i in (1, 2, 3)] == [[0, 2], [0, 3], [0, 1]]
    kv.check_integrity()
    kv.commit(step)
    kv.check_integrity()
    assert pairs(kv.reserve([extent(1, grown(prompt, 51, 60), 7)])) == [], "copied once"


def test_a_block_that_has_to_be_copied_is_not_promised_to_its_holders(kv: KvCacheManager) -> None:
    assert kv.num_promisable_blocks([1]) == 9 + 2
    kv.fork(1, [2, 3])
    assert [kv.num_kept_blocks(i) for i in (1, 2, 3)] == [1, 1, 1]
    assert kv.num_promisable_blocks([1, 2, 3]) == 9 + 3


def test_who_stays_behind_keeps_the_block(kv: KvCacheManager) -> None:
    prompt = tokens(10, tail=2)
    kv.fork(1, [2])
    step = [extent(1, grown(prompt, 51), 6)]
    assert pairs(kv.reserve(step)) == [(1, 2)]
    kv.commit(step)
    assert pairs(kv.reserve([extent(2, grown(prompt, 52), 6)])) == []
    assert (table(kv, 1), table(kv, 2)) == ([0, 2], [0, 1])
    kv.check_integrity()


def test_a_beam_that_is_given_up_leaves_its_blocks_to_the_others(kv: KvCacheManager) -> None:
    kv.fork(1, [2, 3])
    kv.close(1)
    kv.close(3)
    assert kv.num_free_blocks == 9
    assert kv.num_new_blocks(2, 7) == 0
    kv.check_integrity()
    kv.close(2)
    assert kv.num_free_blocks == 11


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20))
    kv.fork(1, [2])
    step = [extent(1, tokens(10, 20, tail=1), 8), extent(2, tokens(10, 20, 30)[:9], 8)]
    assert pairs(kv.reserve(step)) == []
    assert (table(kv, 1), table(kv, 2)) == ([0, 1, 2], [0, 1, 3])
    kv.commit(step)
    kv.check_integrity()


def test_what_forks_write_is_reused_each_under_its_own_tokens() -> None:
    kv = make_kv_cache(enable_partial_reuse=True)
    prompt = tokens(10, tail=2)
    run(kv, 1, prompt)
    kv.fork(1, [2])
    histories = {i: grown(prompt, 50 + i, 60, 61) for i in (1, 2)}
    step = [extent(i, ids, 6) for i, ids in histories.items()]
    kv.reserve(step)
    kv.commit(step)
    for request_id, ids in histories.items():
        kv.open(request_id + 10)
        assert kv.match_prefix(request_id + 10, grown(ids, 1)).num_tokens == 8, (
            "whole blocks; the rest is still being written"
        )
    kv.check_integrity()


def test_a_copy_on_write_needs_its_block_or_nothing_happens() -> None:
    kv = make_kv_cache(num_blocks=3, enable_partial_reuse=True)
    prompt = tokens(10, tail=2)
    run(kv, 1, prompt)
    kv.fork(1, [2, 3])
    assert kv.num_free_blocks == 1
    before = [table(kv, i) for i in (1, 2, 3)]
    with pytest.raises(OutOfBlocksError, match="needs 2 new"):
        kv.reserve([extent(i, grown(prompt, i), 6) for i in (1, 2, 3)])
    assert [table(kv, i) for i in (1, 2, 3)] == before
    kv.check_integrity()


def test_a_fork_of_a_request_that_holds_nothing_is_one_more_request() -> None:
    kv = make_kv_cache()
    kv.open(1)
    kv.fork(1, [2])
    assert table(kv, 2) == []
    with pytest.raises(AssertionError, match="already open"):
        kv.fork(1, [2])


def test_a_fork_in_the_middle_of_an_iteration_is_our_own_bug() -> None:
    kv = make_kv_cache()
    kv.open(1)
    kv.reserve([extent(1, tokens(10))])
    with pytest.raises(AssertionError, match="middle of an iteration"):
        kv.fork(1, [2])


def test_the_scheduler_pauses_a_fork_where_there_is_no_block_for_its_copy() -> None:
    kv = KvCacheManager(1, KvCacheConfig(tokens_per_block=4))
    parent = make_request(1, 2, max_tokens=2)
    prompt = KvExtent(1, 0, parent.token_ids)
    kv.open(1)
    kv.reserve([prompt])
    kv.commit([prompt])
    parent.advance(0, 2)
    parent.append(7)
    kv.fork(1, [2])
    plan = MaxUtilization(4, 16).schedule([parent, forked(parent, 2)], [], kv)
    assert [r.request_id for r in plan.started] == [1]
    assert [r.request_id for r in plan.paused] == [2]
    kv.release(2)
    kv.reserve([KvExtent(1, 2, parent.token_ids)])
    kv.check_integrity()
