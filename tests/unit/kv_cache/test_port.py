"""The manager is what the scheduler's port asks for, although neither room imports the other."""

from __future__ import annotations

import inspect

import pytest

from inflight.api.kv import PrefixMatch
from inflight.kv_cache import KvCacheManager, KvCachePools
from inflight.scheduler.ports import KvCapacity, PoolCapacity
from tests.unit.kv_cache.helpers import make_kv_cache, run, tokens

ASKED = [
    (port, name, books)
    for port, books in (
        (KvCapacity, KvCacheManager),
        (KvCapacity, KvCachePools),
        (PoolCapacity, KvCacheManager),
    )
    for name in sorted(vars(port))
    if name.startswith(("num_", "tokens_", "match_", "next_", "most_", "pools"))
]


def test_the_ports_ask_for_something() -> None:
    assert len(ASKED) == 4 + 4 + 6


@pytest.mark.parametrize(("port", "name", "books"), ASKED)
def test_every_question_of_the_ports_has_an_answer(port: type, name: str, books: type) -> None:
    asked, given = inspect.getattr_static(port, name), inspect.getattr_static(books, name)
    assert type(given) is type(asked)
    if inspect.isfunction(asked):
        assert list(inspect.signature(given).parameters) == list(
            inspect.signature(asked).parameters
        )


def test_a_match_is_what_the_scheduler_expects() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, tail=1))
    kv.open(2)
    match = kv.match_prefix(2, tokens(10, tail=1))
    assert match == PrefixMatch(num_tokens=4, num_referenced_blocks=1)
