"""Sampler: the chosen token, its log-prob, and independence of the company it is computed in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.batch import LlmRequest
from inflight.errors import ForwardError
from inflight.sampling import SampledTokens, Sampler
from inflight.sampling.draw import CounterGenerator
from inflight.sampling.kernels import NumpySampling
from tests.unit.sampling.reference import (
    distribution,
    edited_logits,
    generate,
    make_request,
    softmax,
)

VOCABULARY = 1201  # not a multiple of any vector width

RULES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.8},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.05, "temperature": 1.4},
    {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"top_p": 0.7, "min_tokens": 4, "bad_words": ((3, 5), (8,)), "logit_bias": {5: 4.0, 9: 2.5}},
]


def random_logits(rows: int, seed: int = 0) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, VOCABULARY)).astype(np.float32)
    logits[:, :40] += generator.exponential(3, size=(rows, 40)).astype(np.float32)
    return logits


def sample(
    requests: list[LlmRequest], logits: npt.NDArray[np.float32], *, normalize: bool = False
) -> SampledTokens:
    sampler = Sampler(vocab_size=logits.shape[1], normalize_log_probs=normalize)
    for request in requests:
        sampler.add(request)
    return sampler.sample(sampler.rows(requests), logits.copy())


def test_greedy_rows_take_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = random_logits(3)
    logits[1, 17] = logits[1, 1100] = 99
    requests = [
        make_request(0),
        make_request(1, temperature=0.0, top_p=0.5),
        make_request(2, top_k=1, temperature=5.0),
    ]
    sampled = sample(requests, logits)
    assert sampled.token_ids.dtype == np.int32 and sampled.log_probs.dtype == np.float32
    assert sampled.token_ids.tolist() == [logits[0].argmax(), 17, logits[2].argmax()]
    assert sampled.log_probs.tolist() == [0, 0, 0]


def test_greedy_rows_see_their_edits() -> None:
    logits = random_logits(1)
    first, second = np.argsort(logits[0])[:-3:-1].tolist()
    banned = make_request(bad_words=((first,),))
    assert sample([banned], logits).token_ids.tolist() == [second]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_sampled_tokens_are_the_inverse_of_the_cumulative_distribution(
    rules: dict[str, Any],
) -> None:
    """Token and normalised log-prob of 200 seeds, against the slow rules at the same draw."""
    requests = [
        make_request(seed, seed=seed, prompt=(3, 5, 3), end_ids=(1,), log_probs=True, **rules)
        for seed in range(200)
    ]
    row = random_logits(1)[0]
    sampled = sample(requests, np.tile(row, (200, 1)), normalize=True)
    expected = distribution(requests[0], row)
    ids, cumulative = list(expected), np.cumsum(list(expected.values()))
    compared = 0
    for request, token_id, log_prob in zip(
        requests, sampled.token_ids.tolist(), sampled.log_probs.tolist(), strict=True
    ):
        assert log_prob == pytest.approx(math.log(expected[token_id]), abs=1e-4)
        uniform = CounterGenerator().uniform(request.seed, 0, request.num_tokens)
        if np.abs(cumulative[:-1] - uniform).min(initial=1) > 1e-5:
            assert token_id == ids[int(np.searchsorted(cumulative, uniform, side="right"))]
            compared += 1
    assert compared > 150


def test_frequencies_match_the_probabilities() -> None:
    """Chi-square over 8 tokens and 4,000 seeds: 7 degrees of freedom, 1 in 10,000 above 30."""
    row = np.linspace(-1, 1, 8, dtype=np.float32)
    requests = [make_request(seed, seed=seed, temperature=1.0) for seed in range(4000)]
    counts = np.bincount(sample(requests, np.tile(row, (4000, 1))).token_ids, minlength=8)
    expected = 4000 * np.array(softmax(row.tolist()))
    assert ((counts - expected) ** 2 / expected).sum() < 30


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([{}, *RULES]), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_row_does_not_know_its_company(
    rows: list[tuple[dict[str, Any], int]], seed: int, data: st.DataObject
) -> None:
    def requests() -> list[LlmRequest]:
        return [
            make_request(i, seed=own_seed, prompt=(3, 5 + i), log_probs=True, **rules)
            for i, (rules, own_seed) in enumerate(rows)
        ]

    logits = random_logits(len(rows), seed)
    together = sample(requests(), logits)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample([requests()[i] for i in order], logits[order])
    for place, index in enumerate(order):
        alone = sample([requests()[index]], logits[index : index + 1])
        assert alone.token_ids[0] == together.token_ids[index] == shuffled.token_ids[place]
        assert alone.log_probs[0] == together.log_probs[index] == shuffled.log_probs[place]


def test_the_draw_moves_with_seed_and_position() -> None:
    flat = np.zeros((1, VOCABULARY), dtype=np.float32)
    request, other = (make_request(seed=seed, temperature=1.0) for seed in (5, 6))
    first = sample([request], flat).token_ids[0]
    assert sample([request], flat).token_ids[0] == first
    assert sample([other], flat).token_ids[0] != first
    generate(request, 9)
    assert sample([request], flat).token_ids[0] != first


@pytest.mark.parametrize("rules", [{}, *RULES], ids=str)
def test_log_probs_are_over_the_whole_vocabulary_before_temperature(rules: dict[str, Any]) -> None:
    request = make_request(log_probs=True, seed=3, **rules)
    logits = random_logits(1)
    sampled = sample([request], logits)
    expected = math.log(softmax(edited_logits(request, logits[0]))[sampled.token_ids[0]])
    assert sampled.log_probs[0] == pytest.approx(expected, abs=1e-5)


def test_normalised_log_prob_of_a_greedy_row_is_zero() -> None:
    request = make_request(log_probs=True)
    assert sample([request], random_logits(1), normalize=True).log_probs.tolist() == [0]


def test_log_probs_only_where_asked_for() -> None:
    requests = [make_request(i, log_probs=i == 1, temperature=1.0, seed=i) for i in range(3)]
    assert (sample(requests, random_logits(3)).log_probs != 0).tolist() == [False, True, False]


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.7}, {"top_p": 0.9}], ids=str)
def test_nan_and_infinity_in_a_row(rules: dict[str, Any]) -> None:
    logits = random_logits(4)
    logits[0, ::2] = np.nan
    logits[1, 5] = np.inf
    logits[2, :] = -np.inf
    logits[2, 3] = -1.0
    logits[3, 1:] = np.nan
    requests = [make_request(i, log_probs=True, **rules) for i in range(4)]
    sampled = sample(requests, logits)
    assert sampled.token_ids[0] % 2 == 1
    assert sampled.token_ids[1:].tolist() == [5, 3, 0]
    assert np.isfinite(sampled.log_probs).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_without_a_number_is_an_error(value: float) -> None:
    logits = random_logits(2)
    logits[1] = value
    with pytest.raises(ForwardError, match="no usable number"):
        sample([make_request(0), make_request(1)], logits)


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-7, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 5e-324, "logit_bias": {0: 1e308, 1: -1e308}},
        {"top_p": 5e-324, "repetition_penalty": 1e-6, "logit_bias": {0: 1e308}},
        {"temperature": 1.0, "repetition_penalty": 1e6, "logit_bias": {1: -1e308, 0: 1e308}},
    ],
    ids=str,
)
def test_extreme_values_choose_the_likeliest_and_warn_nobody(rules: dict[str, Any]) -> None:
    logits = random_logits(1)
    likeliest = 0 if "logit_bias" in rules else logits[0].argmax()
    sampled = sample([make_request(prompt=(1, 2), log_probs=True, **rules)], logits)
    assert sampled.token_ids.tolist() == [likeliest]
    assert np.isfinite(sampled.log_probs).all()


def test_an_empty_batch() -> None:
    assert sample([], np.empty((0, VOCABULARY), dtype=np.float32)).token_ids.shape == (0,)


def test_a_removed_id_can_come_back_as_another_request() -> None:
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False)
    logits = random_logits(1)
    likeliest = int(logits[0].argmax())
    for request in (make_request(0, bad_words=((likeliest,),)), make_request(0)):
        sampler.add(request)
        chosen = sampler.sample(sampler.rows([request]), logits.copy()).token_ids[0]
        assert (chosen == likeliest) == (not request.request.bad_words)
        sampler.remove(0)
    sampler.remove(0)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0]), min_size=1, max_size=700),
    uniform=st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53]),
)
def test_pick_never_takes_a_weight_of_zero(weights: list[float], uniform: float) -> None:
    array = np.array(weights, dtype=np.float32)
    if not array.any():
        array[-1] = 1
    place = NumpySampling(len(array)).pick(array, uniform)
    assert array[place] > 0
    total = array.sum(dtype=np.float64)
    before = array[:place].sum(dtype=np.float64)
    assert before <= uniform * total * (1 + 1e-5) + 1e-5
    assert before + array[place] >= uniform * total * (1 - 1e-5) - 1e-5


@pytest.mark.parametrize(
    ("settings", "need"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"log_probs": True}, True),
        ({"temperature": 0.7}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_plain_arg_maxima_need_no_logits(settings: dict[str, Any], need: bool) -> None:
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False)
    requests = [make_request(0), make_request(1, **settings)]
    for request in requests:
        sampler.add(request)
    assert sampler.rows(requests).need_logits is need
    assert not sampler.rows(requests[:1]).need_logits
    assert not sampler.rows([]).need_logits


def test_likeliest_ids_are_tokens_as_they_are() -> None:
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False)
    requests = [make_request(0), make_request(1)]
    for request in requests:
        sampler.add(request)
    rows, logits = sampler.rows(requests), random_logits(2)
    likeliest = sampler.take_likeliest(rows, logits.argmax(axis=1).astype(np.int32))
    sampled = sampler.sample(rows, logits)
    assert likeliest.token_ids.tolist() == sampled.token_ids.tolist()
    assert likeliest.log_probs.tolist() == sampled.log_probs.tolist() == [0, 0]


def test_rows_are_not_disturbed_when_a_request_is_removed() -> None:
    """The loop removes one that has ended while its row is still in flight."""
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False)
    request = make_request(0, temperature=0.8, repetition_penalty=1.2)
    sampler.add(request)
    rows, logits = sampler.rows([request]), random_logits(1)
    expected = sampler.sample(rows, logits.copy()).token_ids.tolist()
    sampler.remove(0)
    assert sampler.sample(rows, logits.copy()).token_ids.tolist() == expected
