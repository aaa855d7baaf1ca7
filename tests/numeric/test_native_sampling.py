"""NativeSampling gives what NumpySampling gives, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.batch import LlmRequest
from inflight.native.library import Isa
from inflight.native.sampling import NativeSampling
from inflight.sampling import Sampler
from inflight.sampling.kernels import NumpySampling, SamplingKernels
from tests.numeric.native_library import library_limited_to, native_library
from tests.unit.sampling.reference import make_request

pytestmark = pytest.mark.numeric

LARGEST = 50_000
ISAS = [Isa.PORTABLE, Isa.AVX2, Isa.AVX512]
Floats = npt.NDArray[np.float32]


@pytest.fixture(params=ISAS, ids=[isa.name for isa in ISAS])
def native(request: pytest.FixtureRequest) -> Iterator[NativeSampling]:
    library = library_limited_to(request.param)
    with library.limited_to(request.param):
        yield NativeSampling(library, LARGEST)


def row_of(size: int, seed: int, spread: float = 3.0, levels: int = 0) -> Floats:
    """``levels`` > 0: that many distinct values, so that many are equal."""
    draw = np.random.default_rng(seed)
    row = draw.normal(size=size).astype(np.float32) * np.float32(spread)
    return np.round(row * levels).astype(np.float32) / levels if levels else row


RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 400},
    {"top_k": 10**6},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p_logit": 2.0},
    {"top_k": 300, "min_p_logit": 4.0, "top_p": 0.7, "temperature": 1.4},
]


def check_survivors(native: NativeSampling, row: Floats, rules: dict[str, Any]) -> None:
    peak = float(row.max())
    if "min_p_logit" in rules:
        rules = rules | {"min_p_logit": min(rules["min_p_logit"], peak)}
    expected_ids, expected_weights = NumpySampling(len(row)).survivors(row, peak, **rules)
    ids, weights = native.survivors(row, peak, **rules)
    assert (ids is None) == (expected_ids is None)
    if ids is not None and expected_ids is not None:
        # The last of a nucleus may be another where sums differ in their last bits.
        assert len(np.setxor1d(ids, expected_ids)) <= (1 if "top_p" in rules else 0)
        assert (np.diff(ids) > 0).all()
        if len(ids) != len(expected_ids):
            return
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 65, 1201, 49_152])
def test_survivors(native: NativeSampling, rules: dict[str, Any], size: int) -> None:
    for seed, levels in ((1, 0), (2, 3)):
        check_survivors(native, row_of(size, seed, levels=levels), rules)


def test_survivors_of_flat_peaked_and_masked_rows(native: NativeSampling) -> None:
    flat, peaked = np.zeros(3000, dtype=np.float32), np.full(3000, -1e30, dtype=np.float32)
    peaked[7] = 1e30
    masked = row_of(3000, 4)
    masked[10:] = -np.inf
    for row in (flat, peaked, masked):
        for rules in ({"top_p": 0.5}, {"top_k": 20}, {"top_k": 20, "top_p": 0.5}, {}):
            check_survivors(native, row, rules)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 4000),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.01, 1.0, 12.0]),
    levels=st.sampled_from([0, 1, 40]),
    top_k=st.none() | st.integers(1, 5000),
    top_p=st.none() | st.floats(0.001, 1.0),
)
def test_survivors_of_random_rows(
    size: int, seed: int, spread: float, levels: int, top_k: int | None, top_p: float | None
) -> None:
    native = NativeSampling(native_library(), LARGEST)
    rules = {name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value}
    check_survivors(native, row_of(size, seed, spread, levels), rules)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 49_152])
def test_pick(native: NativeSampling, size: int) -> None:
    weights = np.exp(row_of(size, 3))
    weights[::3] = 0
    if not weights.any():
        weights[0] = 1
    sums = np.cumsum(weights, dtype=np.float64)
    for uniform in (0.0, 0.1, 0.5, 0.77, 0.999999, 1 - 2.0**-53):
        place = native.pick(weights, uniform)
        assert weights[place] > 0
        before = sums[place] - weights[place]
        slack = 1e-6 * sums[-1]
        assert before - slack <= uniform * sums[-1] <= sums[place] + slack


def requests_of(settings_of: list[dict[str, Any]]) -> list[LlmRequest]:
    return [
        make_request(i, seed=i, log_probs=bool(i % 2), **settings)
        for i, settings in enumerate(settings_of)
    ]


def test_the_sampler_chooses_the_same_tokens_with_either() -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.8, "temperature": 1.3, "repetition_penalty": 1.2},
    ]  # fmt: skip
    logits = np.stack([row_of(49_152, seed, 2.0) for seed in range(24)])

    def sample(kernels: SamplingKernels) -> tuple[list[int], Floats]:
        sampler = Sampler(vocab_size=49_152, normalize_log_probs=False, kernels=kernels)
        requests = requests_of(kinds * 4)
        for request in requests:
            sampler.add(request)
        sampled = sampler.sample(sampler.rows(requests), logits.copy())
        return sampled.token_ids.tolist(), sampled.log_probs

    ids, log_probs = sample(NativeSampling(native_library(), 49_152))
    expected_ids, expected_log_probs = sample(NumpySampling(49_152))
    assert ids == expected_ids
    np.testing.assert_allclose(log_probs, expected_log_probs, rtol=1e-5)
