"""Bias, penalties and masks, each against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.batch import LlmRequest
from inflight.sampling.bad_words import BadWords
from inflight.sampling.edits import EditedRow, LogitEdits, TokenCounts, edit_rows
from tests.unit.sampling.reference import edited_logits, generate, make_request

VOCABULARY = 12
INF = float("inf")


def apply(request: LlmRequest, logits: list[float]) -> list[float]:
    rows = np.array([logits], dtype=np.float32)
    edit_rows(rows, [EditedRow(0, request, LogitEdits(request, len(logits)))])
    return [float(value) for value in rows[0]]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    request = make_request(prompt=(0, 1), repetition_penalty=2.0)
    generate(request, 2)
    assert apply(request, [4, -4, 0, 4]) == [2, -8, 0, 4]


def test_presence_counts_once_and_frequency_each_time_over_prompt_and_generated() -> None:
    request = make_request(prompt=(0, 0, 1), presence_penalty=1.0, frequency_penalty=0.25)
    generate(request, 2, 0)
    assert apply(request, [0, 0, 0, 0]) == [-1.75, -1.25, -1.25, 0]


def test_bias_comes_before_the_penalties() -> None:
    request = make_request(prompt=(0,), repetition_penalty=2.0, logit_bias={0: 6.0, 3: -1.0})
    assert apply(request, [-2, 0, 0, 0]) == [2, 0, 0, -1]


def test_min_tokens_masks_every_end_id_until_reached() -> None:
    request = make_request(min_tokens=2, end_ids=(1, 3, 99))
    assert apply(request, [0, 1, 2, 3]) == [0, -INF, 2, -INF]
    generate(request, 0, 0)
    assert apply(request, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_bad_words_ban_the_last_token_where_the_others_stand() -> None:
    request = make_request(prompt=(5, 6), bad_words=((0,), (6, 1), (5, 6, 2), (7, 3), (9, 5, 6, 4)))
    assert apply(request, [1.0] * 8) == [-INF, -INF, -INF, 1, 1, 1, 1, 1]
    generate(request, 7)
    assert apply(request, [1.0] * 8) == [-INF, 1, 1, -INF, 1, 1, 1, 1]


def test_a_bad_word_longer_than_the_request_can_get_is_not_kept() -> None:
    words = BadWords([(1, 2, 3), (1,) * 4], max_total_tokens=3)
    assert words.banned_after(np.array([1, 2], dtype=np.int32)) == [3]
    assert words.banned_after(np.array([1, 1, 1], dtype=np.int32)) == []


def test_masks_that_leave_nothing_are_not_applied() -> None:
    everything = tuple((i,) for i in range(3))
    request = make_request(prompt=(0,), min_tokens=1, end_ids=(3,), bad_words=everything)
    assert apply(request, [1, 2, 3, 4]) == [1, 2, 3, 4]
    already_impossible = [1, 2, 3, 4, -INF]
    assert apply(request, already_impossible) == already_impossible


def test_an_impossible_token_stays_impossible() -> None:
    request = make_request(
        prompt=(0,), repetition_penalty=0.5, presence_penalty=-5.0, logit_bias={0: 1e308}
    )
    assert apply(request, [-INF, 0]) == [-INF, 0]


@pytest.mark.parametrize("bias", [1e308, -1e308])
def test_a_huge_bias_stays_a_number(bias: float) -> None:
    edited = apply(make_request(prompt=(0,), logit_bias={0: bias}), [1, 0])
    assert np.isfinite(edited).all()
    assert (edited[0] > edited[1]) == (bias > 0)


@settings(max_examples=60, deadline=None)
@given(
    start=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50),
    steps=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=0, max_size=40), max_size=6),
)
def test_counts_follow_a_growing_sequence(start: list[int], steps: list[list[int]]) -> None:
    counts = TokenCounts()
    tokens = list(start)
    for step in [[], *steps]:
        tokens += step
        counts.follow(np.array(tokens, dtype=np.int32))
        ids, expected = np.unique(tokens, return_counts=True)
        assert counts.ids.tolist() == ids.tolist()
        assert counts.counts.tolist() == expected.tolist()


def random_logits(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(scale=3, size=VOCABULARY).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=30),
    pauses=st.sets(st.integers(0, 30)),
    repetition=st.sampled_from([0.8, 1.0, 1.3]),
    presence=st.sampled_from([-0.5, 0.0, 1.5]),
    frequency=st.sampled_from([-0.1, 0.0, 0.4]),
    bad_words=st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3).map(tuple), max_size=4
    ),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5, width=32), max_size=3),
)
def test_all_together_step_by_step_and_across_pauses(
    tokens: list[int],
    pauses: set[int],
    repetition: float,
    presence: float,
    frequency: float,
    bad_words: list[tuple[int, ...]],
    bias: dict[int, float],
) -> None:
    request = make_request(
        prompt=(0, 1, 1),
        end_ids=(2, 5),
        min_tokens=3,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bad_words=tuple(bad_words),
        logit_bias=bias,
    )
    edits = LogitEdits(request, VOCABULARY)
    for step, token_id in enumerate(tokens):
        row = random_logits(step)
        expected = edited_logits(request, row)
        edit_rows(row[None], [EditedRow(0, request, edits)])
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
        generate(request, token_id)
        if step in pauses:
            request.pause()


def test_rows_are_edited_each_by_its_own_request_and_others_not_at_all() -> None:
    kinds: list[dict[str, Any]] = [
        {"prompt": (0, 1, 1), "repetition_penalty": 1.3},
        {"logit_bias": {4: -1.5}, "bad_words": ((3,),)},
        {"prompt": (7, 7, 2, 9), "frequency_penalty": 0.4, "presence_penalty": -0.5},
        {"prompt": (3,), "repetition_penalty": 0.8, "logit_bias": {3: 2.0, 5: 1.0}},
    ]
    requests = [make_request(i, **settings) for i, settings in enumerate(kinds)]
    logits = np.stack([random_logits(seed) for seed in range(7)])
    expected = logits.copy()
    edited = []
    for row, request in zip((6, 1, 0, 4), requests, strict=True):
        expected[row] = edited_logits(request, logits[row])
        edited.append(EditedRow(row, request, LogitEdits(request, VOCABULARY)))
    edit_rows(logits, edited)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
    np.testing.assert_array_equal(logits[[2, 3, 5]], expected[[2, 3, 5]])
