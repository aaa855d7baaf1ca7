"""The manager is what the scheduler's port asks for, although neither room imports the other."""

from __future__ import annotations

import inspect

import pytest

from inflight.api.kv import PrefixMatch
from inflight.kv_cache import KvCacheManager
from inflight.scheduler.ports import KvCapacity
from tests.unit.kv_cache.helpers import make_kv_cache, run, tokens

ASKED = sorted(
    name for name in vars(KvCapacity) if name.startswith(("num_", "tokens_", "match_", "next_"))
)


def test_the_port_asks_for_something() -> None:
    assert len(ASKED) >= 7


@pytest.mark.parametrize("name", ASKED)
def test_every_question_of_the_port_has_an_answer(name: str) -> None:
    asked, given = (
        inspect.getattr_static(KvCapacity, name),
        inspect.getattr_static(KvCacheManager, name),
    )
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
