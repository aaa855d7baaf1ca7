"""Blocks that a sliding window has passed: given up as it moves, and what is reusable then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from inflight.api import KvCacheConfig
from inflight.api.kv_pools import KvGroup, KvPool, first_block_seen, most_blocks
from inflight.errors import IntegrityError, OutOfBlocksError
from inflight.kv_cache import (
    KvCacheManager,
    KvCachePools,
    KvExtent,
    ObservedBlock,
    PrefixIdentity,
)
from tests.unit.kv_cache.helpers import T, extent, tokens

WINDOW = 6


def make_kv(num_blocks: int = 11, window: int = WINDOW, **config: bool) -> KvCacheManager:
    return KvCacheManager(num_blocks, KvCacheConfig(tokens_per_block=T, **config), window=window)


def make_pools(*pools: tuple[int | None, int], **config: bool) -> KvCachePools:
    """(window, blocks) of each."""
    return KvCachePools(
        [KvPool(KvGroup(window, (), 1), num_blocks) for window, num_blocks in pools],
        KvCacheConfig(tokens_per_block=T, **config),
    )


def count(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


def write(kv: KvCacheManager | KvCachePools, request_id: int, start: int, end: int) -> None:
    step = [KvExtent(request_id, start, count(end))]
    kv.reserve(step)
    kv.commit(step)
    kv.check_integrity()


def lose(kv: KvCacheManager, tokens_of_block: np.ndarray) -> None:
    """Evicts the one block that holds these tokens."""
    (node,) = (n for n in kv._tree if n.key.token_ids == tokens_of_block.tobytes())
    kv._pool.reference(node.block)
    kv._pool.take_over(node.block)
    kv._pool.release(node.block)


def seen_blocks(first: int, end: int, window: int) -> int:
    """Blocks with tokens that are written in [first, end) or that its queries see, counted."""
    return len({position // T for position in range(max(0, first - window + 1), end)})


def test_a_query_sees_its_window_and_no_block_before_it() -> None:
    assert [first_block_seen(position, WINDOW, T) for position in (0, 5, 8, 9, 12, 13)] == [
        *(0, 0, 0, 1, 1, 2)
    ]
    assert first_block_seen(1000, None, T) == 0
    assert first_block_seen(8, 1, T) == 2


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
def test_no_more_blocks_are_held_than_was_promised_and_that_many_at_worst(
    window: int, chunk: int
) -> None:
    """Over all places where a chunk can start, against blocks that are counted one by one."""
    for length in (1, 3, 9, 60):
        starts = range(max(0, length - 40), length)
        held = [seen_blocks(at, min(at + chunk, length), window) for at in starts]
        promised = most_blocks(length, window, chunk=chunk, tokens_per_block=T)
        assert max(held) <= promised
        if length == 60:
            assert max(held) == promised


def test_blocks_are_given_up_as_the_window_moves() -> None:
    kv = make_kv()
    kv.open(1)
    held = []
    for position in range(24):
        write(kv, 1, position, position + 1)
        held.append(kv.num_held_blocks(1))
    assert held == [seen_blocks(end, end, WINDOW) for end in range(1, 25)]
    assert kv.num_table_blocks(1) == 6
    assert kv.num_free_blocks == 11 - held[-1]


def test_a_long_sequence_needs_few_blocks() -> None:
    kv = make_kv(3)
    kv.open(1)
    for position in range(400):
        write(kv, 1, position, position + 1)
    assert kv.most_blocks(400, 1) == 3
    assert kv.stats().evicted_blocks == 400 // T - 3


def test_a_chunk_is_held_whole_with_the_window_before_it() -> None:
    kv = make_kv()
    kv.open(1)
    write(kv, 1, 0, 16)
    assert kv.num_held_blocks(1) == 2
    kv.reserve([extent(1, count(32), 16)])
    assert kv.num_held_blocks(1) == 2 + 4 <= kv.most_blocks(32, 16)


def test_a_passed_place_keeps_an_id_of_the_pool() -> None:
    kv = make_kv(3)
    kv.open(1)
    for position in range(40):
        write(kv, 1, position, position + 1)
    table = kv.block_table(1)
    assert len(table) == 10 and ((table >= 0) & (table < 3)).all()


def test_passed_blocks_stay_reusable_until_they_are_evicted() -> None:
    kv = make_kv()
    kv.open(1)
    write(kv, 1, 0, 24)
    kv.open(2)
    assert kv.match_prefix(2, count(13)).num_tokens == 12
    assert kv.match_prefix(2, count(25)).num_tokens == 24
    kv.reserve([extent(2, count(13), 12)])
    assert kv.num_held_blocks(2) == 3, "tokens 7 to 12: two blocks reused, and a new one"
    kv.check_integrity()


def test_a_prefix_is_reusable_whose_beginning_is_gone() -> None:
    kv = make_kv(4)
    kv.open(1)
    for position in range(24):
        write(kv, 1, position, position + 1)
    kv.close(1)
    kv.open(2)
    match = kv.match_prefix(2, count(30))
    assert (match.num_tokens, match.num_referenced_blocks) == (24, 0)
    kv.reserve([extent(2, count(25), 24)])
    assert (kv.num_table_blocks(2), kv.num_held_blocks(2)) == (7, 3)
    assert kv.request_counts(2).reused == 6
    kv.check_integrity()


def test_a_shorter_prefix_is_not_reusable_where_its_window_is_gone() -> None:
    kv = make_kv(4)
    kv.open(1)
    for position in range(24):
        write(kv, 1, position, position + 1)
    kv.close(1)
    kv.open(2)
    kv.match_prefix(2, count(30))
    found = [kv.beginning(2, count(30), most).num_blocks for most in (6, 5, 4, 3)]
    assert found == [6, 5, 4, 0]
    with pytest.raises(OutOfBlocksError):
        kv.reserve([extent(2, count(14), 12)])


def test_other_tokens_before_the_window_are_another_prefix() -> None:
    """What the window no longer shows has gone into the KV that it does show."""
    kv = make_kv()
    kv.open(1)
    first = tokens(10, 20, 30, 40, tail=1)
    kv.reserve([extent(1, first)])
    kv.commit([extent(1, first)])
    kv.open(2)
    assert kv.match_prefix(2, tokens(50, 20, 30, 40, tail=1)).num_tokens == 0
    kv.open(3, PrefixIdentity("tenant"))
    assert kv.match_prefix(3, first).num_tokens == 0


def test_a_part_is_copied_and_what_its_first_token_does_not_see_is_not_held() -> None:
    """The window of position 15 begins at 10: of three whole blocks it sees the last."""
    kv = make_kv()
    kv.open(1)
    write(kv, 1, 0, 16)
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, count(16)).num_tokens == 15
    copies = kv.reserve([extent(2, count(16), 15)])
    kv.check_integrity()
    assert kv.block_table(2)[2:].tolist() == [2, *copies.target_ids]
    assert copies.source_ids.tolist() == [3] and kv.num_held_blocks(2) == 2


def test_a_part_that_a_request_left_behind_needs_only_its_window() -> None:
    kv = make_kv()
    kv.open(1)
    for position in range(19):
        write(kv, 1, position, position + 1)
    kv.close(1)
    for lost in (0, 1):  # a query at 16 sees from 11 on
        lose(kv, count(16)[lost * T : (lost + 1) * T])
    kv.open(2)
    assert kv.match_prefix(2, count(30)).num_tokens == 19
    kv.reserve([extent(2, count(20), 19)])
    kv.check_integrity()


def test_pools_reuse_a_part_as_far_as_all_of_them_have_it() -> None:
    """The first pool has seven tokens of the second block, the other lost its end."""
    kv = make_pools((None, 9), (3, 9))
    for request_id, end in ((1, 8), (2, 6)):
        kv.open(request_id)
        write(kv, request_id, 0, end)
    kv.close(2)
    kv.close(1)
    kv.open(3)
    assert kv.match_prefix(3, count(9)).num_tokens == 8
    lose(kv.pools[1], count(8)[4:])
    kv.open(4)
    write(kv, 4, 0, 6)
    kv.close(4)
    assert [pool.match_prefix(3, count(9)).num_tokens for pool in kv.pools] == [8, 6]
    match = kv.match_prefix(3, count(9))
    assert match.num_tokens == 6
    copies = kv.reserve([extent(3, count(9), match.num_tokens)])
    assert len(copies.target_ids) == len(copies.further[0].target_ids) == 1
    kv.check_integrity()


def test_without_reuse_passed_blocks_are_empty() -> None:
    kv = make_kv(enable_block_reuse=False)
    kv.open(1)
    write(kv, 1, 0, 24)
    assert kv._pool.num_empty == kv.num_free_blocks == 9


def test_a_fork_passes_its_blocks_by_itself() -> None:
    kv = make_kv()
    kv.open(1)
    write(kv, 1, 0, 10)
    kv.fork(1, [2])
    assert kv.num_releasable_blocks(1) == 0
    for position in range(10, 20):
        write(kv, 1, position, position + 1)
    assert kv.num_held_blocks(1) == 2 and kv.num_held_blocks(2) == 2
    assert kv.num_releasable_blocks(2) == 2, "the other one has passed them"


def test_events_name_the_block_before() -> None:
    heard: list[ObservedBlock] = []

    class Listener:
        stored = staticmethod(heard.append)

        def removed(self, blocks: Sequence[ObservedBlock]) -> None:
            pass

    config = KvCacheConfig(tokens_per_block=T)
    kv = KvCacheManager(8, config, window=WINDOW, observers=(Listener(),))
    kv.open(1)
    write(kv, 1, 0, 12)
    root = PrefixIdentity().root_digest()
    assert [block.parent_digest for block in heard] == [
        None,
        heard[0].key.digest,
        heard[1].key.digest,
    ]
    assert {block.root_digest for block in heard} == {root}


def spoil_by_passing_too_much(kv: KvCacheManager) -> None:
    for block in kv._sequences[1].pass_blocks(5):
        kv._pool.release(block)


def spoil_by_passing_too_little(kv: KvCacheManager) -> None:
    kv._sequences[1].num_passed -= 1
    kv._pool.reference(kv._sequences[1].blocks[3])


@pytest.mark.parametrize("spoil", [spoil_by_passing_too_much, spoil_by_passing_too_little])
def test_a_window_that_moved_wrongly_is_found(spoil: object) -> None:
    kv = make_kv()
    kv.open(1)
    write(kv, 1, 0, 24)
    spoil(kv)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="4 are out of its window"):
        kv.check_integrity()


def test_pools_hold_what_their_windows_see() -> None:
    kv = make_pools((None, 10), (3, 4), (6, 5))
    kv.open(1)
    for position in range(24):
        write(kv, 1, position, position + 1)
    assert [pool.num_held_blocks(1) for pool in kv.pools] == [6, 1, 2]
    assert kv.num_free_blocks == 19 - 9 and kv.num_blocks == 19


def test_a_prefix_is_reusable_where_all_pools_have_it() -> None:
    """Of the pool with a window the beginning is evicted, so only a late enough end is left."""
    kv = make_pools((None, 20), (WINDOW, 4))
    kv.open(1)
    for position in range(24):
        write(kv, 1, position, position + 1)
    kv.close(1)
    kv.open(2)
    assert kv.match_prefix(2, count(30)).num_tokens == 24
    assert kv.match_prefix(2, count(21)).num_tokens == 20
    assert kv.match_prefix(2, count(14)).num_tokens == 0
    assert kv.pools[0].match_prefix(2, count(14)).num_tokens == 13


def test_what_is_waited_for_comes_after_what_all_pools_reuse() -> None:
    kv = make_pools((None, 20), (WINDOW, 20))
    kv.open(1)
    write(kv, 1, 0, 8)
    kv.open(2)
    match = kv.match_prefix(2, count(20))
    assert match.num_referenced_blocks == 2
    assert match.next_block == kv.next_block(1, count(20)) is not None


def test_pools_are_reserved_all_or_none() -> None:
    kv = make_pools((None, 20), (WINDOW, 3))
    kv.open(1)
    free = [pool.num_free_blocks for pool in kv.pools]
    with pytest.raises(OutOfBlocksError):
        kv.reserve([extent(1, count(16))])
    assert [pool.num_free_blocks for pool in kv.pools] == free
    assert kv.num_free_blocks == 23


def test_copies_of_a_fork_are_made_in_each_pool() -> None:
    kv = make_pools((None, 10), (3, 10))
    kv.open(1)
    write(kv, 1, 0, 6)
    kv.fork(1, [2])
    copies = kv.reserve([extent(1, count(7), 6), extent(2, count(7), 6)])
    assert [len(each.target_ids) for each in (copies, *copies.further)] == [1, 1]


def test_pools_that_are_not_in_step_are_found() -> None:
    kv = make_pools((None, 10), (3, 10))
    kv.open(1)
    kv.pools[1].open(2)
    with pytest.raises(IntegrityError, match="the pools differ"):
        kv.check_integrity()
