"""Priorities and durations: which cached blocks go first, and until when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.api import KvCacheConfig
from inflight.api.kv import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.errors import InvalidRequestError
from inflight.kv_cache import BlockRetention, KvCacheManager
from inflight.kv_cache.retention import Retention
from tests.unit.kv_cache.helpers import T, extent, take_all, tokens


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(num_blocks: int, clock: Clock | None = None) -> KvCacheManager:
    config = KvCacheConfig(tokens_per_block=T)
    return KvCacheManager(num_blocks, config, clock=clock or Clock())


def ranges(*items: tuple[int, int | None, int, int | None]) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig(
        token_range_retention_configs=tuple(
            TokenRangeRetentionConfig(token_start=a, token_end=b, priority=p, duration_ms=d)
            for a, b, p, d in items
        )
    )


def run(
    kv: KvCacheManager,
    request_id: int,
    blocks: Sequence[int],
    config: KvCacheRetentionConfig | None = None,
    prompt_length: int | None = None,
) -> None:
    """Computes these blocks and closes the request."""
    ids = tokens(*blocks)
    length = len(ids) if prompt_length is None else prompt_length
    kv.open(request_id, retention=None if config is None else BlockRetention(config, length))
    step = [extent(request_id, ids, kv.match_prefix(request_id, ids).num_tokens)]
    kv.reserve(step)
    kv.commit(step)
    kv.close(request_id)
    kv.check_integrity()


def test_a_range_touches_every_block_that_holds_one_of_its_tokens() -> None:
    """Blocks of 16: [0, 17) touches the first two."""
    retention = BlockRetention(ranges((0, 17, 80, 500)), prompt_length=40)
    assert [retention.of_block(i, 16) for i in range(3)] == [
        Retention(80, 500),
        Retention(80, 500),
        None,
    ]


def test_the_highest_priority_of_several_ranges_counts_and_an_open_range_ends_with_the_prompt() -> (
    None
):
    config = ranges((0, None, 10, None), (18, 20, 90, 7), (16, 18, 50, None))
    retention = BlockRetention(config, prompt_length=33)
    assert [retention.of_block(i, 16) for i in range(4)] == [
        Retention(10, None),
        Retention(90, 7),
        Retention(10, None),
        Retention(35, None),
    ]


def test_a_block_is_the_prompts_if_its_first_token_is() -> None:
    config = KvCacheRetentionConfig(decode_retention_priority=3, decode_duration_ms=9)
    retention = BlockRetention(config, prompt_length=17)
    assert retention.of_block(1, 16) is None
    assert retention.of_block(2, 16) == Retention(3, 9)
    assert BlockRetention(config, prompt_length=16).of_block(1, 16) == Retention(3, 9)


def test_the_lowest_priority_goes_first_then_the_oldest() -> None:
    kv = make(4)
    run(kv, 1, [10], ranges((0, None, 80, None)))  # block 0
    run(kv, 2, [20])  # block 1
    run(kv, 3, [30], ranges((0, None, 1, None)))  # block 2
    run(kv, 4, [40])  # block 3
    assert take_all(kv, 5) == [2, 1, 3, 0]


def test_leaves_only_however_low_the_priority_of_what_is_before_them() -> None:
    kv = make(4)
    run(kv, 1, [10, 20, 30], ranges((0, 8, 0, None), (8, 12, 90, None)))  # blocks 0 1 2
    run(kv, 2, [40])  # block 3
    assert take_all(kv, 3) == [3, 2, 1, 0]
    kv.check_integrity()


def test_the_decode_priority_is_that_of_generated_blocks() -> None:
    kv = make(3)
    config = KvCacheRetentionConfig(decode_retention_priority=0)
    run(kv, 1, [10, 20], config, prompt_length=4)  # block 1 is generated
    run(kv, 2, [40])  # block 2
    assert take_all(kv, 3) == [1, 0, 2]


def test_after_its_duration_a_block_has_the_default_priority_at_its_age() -> None:
    clock = Clock()
    kv = make(4, clock)
    run(kv, 1, [10], ranges((0, None, 80, 5000)))  # block 0
    run(kv, 2, [20], ranges((0, None, 80, 9000)))  # block 1
    run(kv, 3, [30])  # block 2
    run(kv, 4, [40], ranges((0, None, 36, None)))  # block 3
    clock.now += 5.0
    assert take_all(kv, 5) == [0, 2, 3, 1]


def test_a_low_priority_may_expire_as_well() -> None:
    clock = Clock()
    kv = make(2, clock)
    run(kv, 1, [20])  # block 0
    run(kv, 2, [10], ranges((0, None, 0, 1000)))  # block 1
    clock.now += 1.0
    assert take_all(kv, 3) == [0, 1]


def test_a_duration_runs_from_the_last_release() -> None:
    clock = Clock()
    kv = make(3, clock)
    run(kv, 1, [10], ranges((0, None, 80, 5000)))  # block 0
    run(kv, 2, [20])  # block 1
    clock.now += 4.0
    run(kv, 3, [10, 30])  # holds block 0 again; block 2
    clock.now += 4.0
    assert take_all(kv, 4) == [1, 2, 0]


def test_who_reuses_a_block_and_says_something_about_it_decides() -> None:
    kv = make(3)
    run(kv, 1, [10], ranges((0, None, 80, None)))  # block 0
    run(kv, 2, [20])  # block 1
    run(kv, 3, [10, 30], ranges((0, 4, 1, None)))  # blocks 0 2
    assert take_all(kv, 4) == [1, 2, 0], "block 0 comes last, as it is no leaf till then"
    kv = make(3)
    run(kv, 1, [10], ranges((0, None, 80, None)))
    run(kv, 2, [20])
    run(kv, 3, [10, 30])
    kv.open(4)
    kv.reserve([extent(4, tokens(60, 70))])
    assert kv.block_table(4).tolist() == [1, 2]


def test_stale_entries_do_not_pile_up() -> None:
    clock = Clock()
    kv = make(4, clock)
    for request_id in range(500):
        run(kv, request_id, [10, 20], ranges((0, None, 80, 10_000_000)))
    order = kv._pool.cached_blocks
    assert len(order._leaves) < 100 and len(order._expiring) < 100
    assert sorted(take_all(kv, 1000)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ((-1, None, 35, None), "starts"),
        ((4, 4, 35, None), "ends"),
        ((0, 4, 101, None), "priorities"),
        ((0, 4, -1, None), "priorities"),
        ((0, 4, 35, -2), "durations_ms"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused_by_name(
    item: tuple[int, int | None, int, int | None], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"retention_token_range_{name}"):
        ranges(item)


def test_decode_retention_and_the_number_of_ranges_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="retention_decode_priority"):
        KvCacheRetentionConfig(decode_retention_priority=101)
    with pytest.raises(InvalidRequestError, match="retention_decode_duration_ms"):
        KvCacheRetentionConfig(decode_duration_ms=-1)
    assert ranges(*[(0, None, 35, None)] * 64)
    with pytest.raises(InvalidRequestError, match="at most 64"):
        ranges(*[(0, None, 35, None)] * 65)
