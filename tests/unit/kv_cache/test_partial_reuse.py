"""Blocks of which only the beginning is reused: by a copy, or by taking the block over."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import OutOfBlocksError
from inflight.kv_cache import BlockCopies, KvCacheManager, PrefixIdentity
from tests.unit.kv_cache.helpers import counts, extent, make_kv_cache, run, table, tokens


def make(num_blocks: int = 11, *, copy: bool = True) -> KvCacheManager:
    return make_kv_cache(num_blocks, enable_partial_reuse=True, copy_on_partial_reuse=copy)


def pairs(copies: BlockCopies) -> list[tuple[int, int]]:
    return list(zip(copies.source_ids.tolist(), copies.target_ids.tolist(), strict=True))


def start(kv: KvCacheManager, request_id: int, ids: np.ndarray) -> list[tuple[int, int]]:
    """Opens a request, reuses all it can, and returns the copies that are to be made."""
    kv.open(request_id)
    return pairs(kv.reserve([extent(request_id, ids, kv.match_prefix(request_id, ids).num_tokens)]))


@pytest.mark.parametrize("length", [14, 15, 16])
def test_the_counters_of_the_same_prompt_twice_are_those_of_tensorrt_llm(length: int) -> None:
    """new 4, total 4, reused 0; then new 1, total 1, reused 4."""
    kv = make()
    prompt = tokens(10, 20, 30, 40)[:length]
    for request_id, expected in ((1, (4, 4, 0)), (2, (1, 1, 4))):
        run(kv, request_id, prompt)
        new_total_reused = counts(kv, request_id)[1], counts(kv, request_id)[0]
        assert (*new_total_reused, counts(kv, request_id)[2]) == expected
        kv.close(request_id)
    assert kv.stats().cache_hit_rate == 0.5


def test_a_token_is_left_to_compute() -> None:
    kv = make()
    run(kv, 1, tokens(10, 20))
    kv.open(2)
    assert kv.match_prefix(2, tokens(10, 20)).num_tokens == 7
    assert kv.match_prefix(2, tokens(10, 20, tail=1)).num_tokens == 8
    kv.open(3)
    assert kv.match_prefix(3, tokens(10)[:1]).num_tokens == 0


def test_the_longest_common_beginning_is_found_among_many() -> None:
    kv = make(60)
    ids = tokens(10)
    for request_id, second in enumerate((3, 300, 70_000, 5)):
        run(kv, request_id, np.append(ids, [second, 8, 9, second]).astype(np.int32))
        kv.close(request_id)
    for request_id, tail, reusable in (
        (10, [70_000, 8, 1], 6),
        (11, [70_000 - 2**16, 8, 1], 4),  # differs in a byte, so in the token
        (12, [5, 8, 9, 6, 6], 7),
        (13, [6, 8, 9, 6, 6], 4),
    ):
        kv.open(request_id)
        query = np.append(ids, tail).astype(np.int32)
        assert kv.match_prefix(request_id, query).num_tokens == reusable
        assert kv.match_prefix(request_id, query).num_referenced_blocks == 0


def test_a_block_in_use_is_copied_and_stays_with_its_owner() -> None:
    kv = make()
    run(kv, 1, tokens(10, 20, tail=3))  # blocks 0 1 2
    other = np.append(tokens(10), [20, 21, 77]).astype(np.int32)
    assert start(kv, 2, other) == [(1, 3)]
    assert table(kv, 2) == [0, 3]
    assert kv.num_free_blocks == 7
    kv.check_integrity()
    kv.commit([extent(2, other, 6)])
    kv.check_integrity()
    assert counts(kv, 2) == (1, 1, 2, 0)


def test_the_part_that_a_request_leaves_behind_is_reused() -> None:
    kv = make()
    run(kv, 1, tokens(10, tail=3))
    kv.close(1)
    longer = tokens(10, tail=6)
    assert start(kv, 2, longer) == [(1, 2)]
    kv.commit([extent(2, longer, 7)])
    kv.check_integrity()
    assert kv.stats().evicted_blocks == 0


def test_a_part_that_another_block_contains_takes_no_block() -> None:
    kv = make()
    run(kv, 1, tokens(10, tail=2))
    kv.close(1)
    cached = [block.block_id for block in kv._pool.cached_blocks]
    assert cached == [1, 0]
    run(kv, 2, tokens(10, tail=3))  # contains the part of the first
    kv.close(2)
    assert len(kv._pool.cached_blocks) == 2
    run(kv, 3, tokens(10, tail=1))  # is contained in the part of the second
    kv.close(3)
    assert len(kv._pool.cached_blocks) == 2
    run(kv, 4, tokens(10, 900))  # a full block that contains it as well
    kv.close(4)
    assert len(kv._pool.cached_blocks) == 2
    kv.check_integrity()


def test_a_source_is_held_until_the_copy_is_made() -> None:
    kv = make()
    run(kv, 1, tokens(10, tail=3))
    kv.close(1)
    ids = tokens(10, tail=6)
    start(kv, 2, ids)
    source = kv._pool.blocks[1]
    assert source.ref_count == 1
    kv.check_integrity()
    kv.commit([extent(2, ids, 7)])
    assert source.ref_count == 0
    kv.close(2)


@pytest.mark.parametrize("end", ["close", "release"])
def test_a_copy_that_was_never_made_leaves_nothing_behind(end: str) -> None:
    kv = make()
    run(kv, 1, tokens(10, tail=3))
    kv.close(1)
    start(kv, 2, tokens(10, tail=6))
    getattr(kv, end)(2)
    kv.check_integrity()
    assert kv.num_free_blocks == 11
    assert sorted(block.block_id for block in kv._pool.cached_blocks) == [0, 1]


def test_the_last_block_left_is_taken_over() -> None:
    kv = make(num_blocks=3)
    run(kv, 1, tokens(10, tail=3))  # blocks 0 1
    kv.close(1)
    assert start(kv, 2, tokens(10, 900, tail=1)) == [], "three blocks are needed, and there are 3"
    assert table(kv, 2) == [0, 1, 2]
    kv.check_integrity()
    kv.commit([extent(2, tokens(10, 900, tail=1), 7)])
    kv.check_integrity()


def test_a_source_is_copied_while_there_is_a_block_for_the_copy() -> None:
    kv = make(num_blocks=2)
    run(kv, 1, tokens(10))
    kv.close(1)
    assert start(kv, 2, tokens(10)) == [(0, 1)]
    assert kv.num_free_blocks == 0, "the source is held until the copy is made"
    kv.commit([extent(2, tokens(10), 3)])
    kv.check_integrity()
    assert kv.num_free_blocks == 1 and kv.stats().evicted_blocks == 0


def test_a_source_with_something_after_it_is_taken_over_when_that_is_evicted() -> None:
    kv = make(num_blocks=3)
    run(kv, 1, tokens(10, 20, 30))
    kv.close(1)
    ids = np.append(tokens(10)[:2], range(700, 710)).astype(np.int32)
    assert start(kv, 2, ids) == []
    assert table(kv, 2)[0] == 0 and sorted(table(kv, 2)) == [0, 1, 2]
    assert kv.stats().evicted_blocks == 2, "the third was taken over: it is reused"
    kv.check_integrity()


def test_of_several_that_want_the_last_source_the_last_takes_it_over() -> None:
    kv = make(num_blocks=3)
    run(kv, 1, tokens(10)[:3])  # block 0
    kv.close(1)
    requests = {i: np.append(tokens(10)[:3], [50 + i]).astype(np.int32) for i in (2, 3, 4)}
    for request_id, ids in requests.items():
        kv.open(request_id)
        assert kv.match_prefix(request_id, ids) == (3, 0, None)
    step = [extent(request_id, ids, 3) for request_id, ids in requests.items()]
    copies = pairs(kv.reserve(step))
    assert copies == [(0, 1), (0, 2)]
    assert [table(kv, i) for i in requests] == [[1], [2], [0]]
    kv.check_integrity()
    kv.commit(step)
    kv.check_integrity()


def test_without_copying_only_unused_blocks_are_reused_in_part() -> None:
    kv = make(copy=False)
    run(kv, 1, tokens(10, 20, tail=1))
    other = np.append(tokens(10), [20, 21, 77]).astype(np.int32)
    kv.open(2)
    assert kv.match_prefix(2, other).num_tokens == 4, "its owner still runs"
    kv.close(1)
    assert kv.match_prefix(2, other).num_tokens == 4, "a block comes after it"
    kv.open(3)
    follows = np.append(tokens(10, 20), [900, 77]).astype(np.int32)
    assert kv.match_prefix(3, follows).num_tokens == 9
    assert pairs(kv.reserve([extent(3, follows, 9)])) == []
    assert table(kv, 3) == [0, 1, 2]
    kv.check_integrity()
    assert counts(kv, 3) == (1, 0, 3, 0)


def test_without_copying_two_that_start_at_once_still_get_what_was_offered() -> None:
    kv = make(copy=False)
    run(kv, 1, tokens(10, tail=2))
    kv.close(1)
    requests = {i: np.append(tokens(10, tail=2), [50 + i]).astype(np.int32) for i in (2, 3)}
    for request_id, ids in requests.items():
        kv.open(request_id)
        assert kv.match_prefix(request_id, ids).num_tokens == 6
    step = [extent(request_id, ids, 6) for request_id, ids in requests.items()]
    assert pairs(kv.reserve(step)) == [(1, 2)]
    assert table(kv, 3) == [0, 1]
    kv.check_integrity()


def test_a_plan_that_counts_on_a_lost_part_is_refused() -> None:
    kv = make(num_blocks=4)
    run(kv, 1, tokens(10, tail=3))
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, tokens(10, tail=4)).num_tokens == 7
    run(kv, 3, tokens(50, 60, 70))
    with pytest.raises(OutOfBlocksError, match="3 tokens of a block that is not cached"):
        kv.reserve([extent(2, tokens(10, tail=4), 7)])
    kv.check_integrity()


def test_parts_keep_to_their_identity() -> None:
    kv = make()
    run(kv, 1, tokens(10)[:3], "a")
    kv.close(1)
    for request_id, salt, reusable in ((2, "b", 0), (3, None, 0), (4, "a", 2)):
        kv.open(request_id, PrefixIdentity(salt))
        assert kv.match_prefix(request_id, tokens(10)[:3]).num_tokens == reusable


def test_the_search_goes_on_past_blocks_in_use_but_not_for_ever() -> None:
    kv = make(100, copy=False)
    for request_id in range(20):
        run(kv, request_id, np.array([1, 1, 1, 100 + request_id], dtype=np.int32))
    query = np.array([1, 1, 1, 7], dtype=np.int32)
    kv.open(50)
    kv.close(10)
    assert kv.match_prefix(50, query).num_tokens == 3
    run(kv, 10, np.array([1, 1, 1, 110], dtype=np.int32))
    kv.close(19)
    assert kv.match_prefix(50, query).num_tokens == 0, "the twentieth is not looked at"
