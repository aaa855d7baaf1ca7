"""RequestRules: rules stay at their request's place, however many come and go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.batch import LlmRequest
from inflight.sampling.draw import CounterGenerator
from inflight.sampling.rules import RULES, RequestRules
from tests.unit.sampling.reference import generate, make_request

VOCABULARY = 97


def test_plain_requests_alone_have_no_rules_and_beside_others_neutral_ones() -> None:
    rules = RequestRules(VOCABULARY)
    plain, drawn = make_request(0), make_request(1, temperature=0.5, seed=9)
    rules.add(plain, is_plain=True)
    rules.add(drawn, is_plain=False)
    assert rules.rows([plain]) is None and rules.rows([]) is None
    rows = rules.rows([drawn, plain])
    assert rows is not None and rows.dtype == RULES
    assert rows["temperature"].tolist() == [0.5, 0.0]
    assert rows["top_k"].tolist() == [VOCABULARY, VOCABULARY]
    assert rows["repetition_penalty"].tolist() == [1, 1]
    assert rows["uniform"].tolist() == [CounterGenerator().uniform(9, 0, 3), 0.0]


def test_draws_follow_the_position_and_rows_are_a_copy() -> None:
    rules, request = RequestRules(VOCABULARY), make_request(0, temperature=1.0, seed=4)
    rules.add(request, is_plain=False)
    first = rules.rows([request])
    generate(request, 8)
    second = rules.rows([request])
    assert first is not None and second is not None
    assert first["uniform"][0] == CounterGenerator().uniform(4, 0, 3)
    assert second["uniform"][0] == CounterGenerator().uniform(4, 0, 4)
    rules.remove(0)
    with pytest.raises(KeyError):
        rules.rows([request])


@given(data=st.data())
def test_each_request_has_its_own_rules_through_any_coming_and_going(data: st.DataObject) -> None:
    """Against a dictionary; temperatures tell requests apart."""
    rules, known = RequestRules(VOCABULARY), dict[int, LlmRequest]()
    bursts = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=4))
    next_id = 0
    for num_new, num_gone in bursts:
        for _ in range(num_new):
            plain = next_id % 5 == 0
            settings: dict[str, Any] = {} if plain else {"temperature": 1.0 + next_id / 1024}
            known[next_id] = make_request(next_id, **settings)
            rules.add(known[next_id], is_plain=plain)
            next_id += 1
        for request_id in list(known)[::2][:num_gone]:
            rules.remove(request_id)
            del known[request_id]
        rules.remove(next_id)  # never added
        rows = rules.rows(list(known.values()))
        expected = [0.0 if i % 5 == 0 else 1.0 + i / 1024 for i in known]
        assert (rows is None) == (not any(expected))
        assert rows is None or rows["temperature"].tolist() == expected
