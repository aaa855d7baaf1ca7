"""From changes to events: each fact once, neighbours of one chain together."""

from __future__ import annotations

from inflight.kv_events.announcer import Announcer
from inflight.kv_events.changes import CachedBlock, Change
from inflight.kv_events.events import BlockRemoved, BlockStored, CacheGroup, KvEvent
from tests.unit.kv_cache.helpers import T
from tests.unit.kv_events.helpers import cached

A, B, C, D = cached(1), cached(2, parent=1), cached(3, parent=2), cached(4, parent=1)


def stored(*blocks: CachedBlock) -> list[Change]:
    return [Change(block, True) for block in blocks]


def removed(*blocks: CachedBlock) -> list[Change]:
    return [Change(block, False) for block in blocks]


def stored_event(*numbers: int, parent: int | None, medium: str = "GPU") -> BlockStored:
    token_ids = tuple(n for n in numbers for _ in range(T))
    return BlockStored(numbers, parent, token_ids, T, medium)


def test_a_chain_is_one_event_and_a_branch_begins_another() -> None:
    assert Announcer(T).events(stored(A, B, C, D)) == [
        stored_event(1, 2, 3, parent=None),
        stored_event(4, parent=1),
    ]


def test_removals_of_one_tier_are_one_event_in_their_order() -> None:
    announcer = Announcer(T)
    announcer.events(stored(A, B, C))
    assert announcer.events(removed(C, B)) == [BlockRemoved((3, 2), "GPU")]


def test_what_is_known_is_not_said_again() -> None:
    announcer = Announcer(T)
    announcer.events(stored(A))
    assert announcer.events(stored(A) + removed(B)) == []
    assert announcer.events(removed(A) + stored(A)) == [
        BlockRemoved((1,), "GPU"),
        stored_event(1, parent=None),
    ]


def test_a_block_that_moves_down_is_stored_there_before_it_is_removed_here() -> None:
    announcer = Announcer(T)
    announcer.events(stored(A))
    moved = stored(cached(1, medium="CPU")) + removed(A)
    assert announcer.events(moved) == [
        stored_event(1, parent=None, medium="CPU"),
        BlockRemoved((1,), "GPU"),
    ]


def test_tiers_are_never_mixed_in_one_event() -> None:
    announcer = Announcer(T)
    events = announcer.events(stored(A, cached(2, parent=1, medium="CPU")))
    assert [event.medium for event in events if isinstance(event, BlockStored)] == ["GPU", "CPU"]


def test_a_new_state_is_told_as_a_difference_children_removed_first() -> None:
    announcer = Announcer(T)
    announcer.events(stored(A, B, C))
    events: list[KvEvent] = announcer.events(announcer.changes_to([A, D]))
    assert events == [BlockRemoved((3, 2), "GPU"), stored_event(4, parent=1)]
    assert announcer.changes_to([A, D]) == []
    assert announcer.events(announcer.changes_to([])) == [BlockRemoved((4, 1), "GPU")]


def test_the_published_hash_is_the_end_of_the_name() -> None:
    block = CachedBlock(bytes(range(32)), "GPU", None, b"\0" * 4 * T)
    (event,) = Announcer(T).events(stored(block))
    assert isinstance(event, BlockStored)
    assert event.block_hashes == (0x18191A1B1C1D1E1F,)


def test_pools_are_never_mixed_in_one_event_and_each_is_told_by_itself() -> None:
    full, window = CacheGroup(0, None), CacheGroup(1, 64)
    announcer = Announcer(T)
    changes = stored(*(block._replace(group=group) for group in (full, window) for block in (A, B)))
    assert announcer.events(changes) == [
        stored_event(1, 2, parent=None)._replace(group=full),
        stored_event(1, 2, parent=None)._replace(group=window),
    ]
    assert announcer.events(removed(A._replace(group=window))) == [
        BlockRemoved((1,), "GPU", window)
    ]
    assert announcer.changes_to([A._replace(group=full), B._replace(group=full)]) == removed(
        B._replace(group=window)
    )
