"""NativeSampling gives what NumpySampling gives, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.native.library import Isa, NativeLibrary
from inflight.native.sampling import NativeSampling
from inflight.sampling import SampledTokens, Sampler
from inflight.sampling.draw import CounterGenerator
from inflight.sampling.kernels import NumpySampling, SamplingKernels
from inflight.sampling.rules import RULES
from tests.numeric.native_library import library_limited_to, native_library
from tests.unit.sampling.reference import make_request

pytestmark = pytest.mark.numeric

ISAS = [Isa.PORTABLE, Isa.AVX2, Isa.AVX512]
Floats = npt.NDArray[np.float32]
NO_RULES = {"temperature": 1.0, "top_k": 10**6, "top_p": 1.0, "min_p_offset": -np.inf}
EDGES = (0.0, 1e-12, 1 - 2.0**-53)


@pytest.fixture(params=ISAS, ids=[isa.name for isa in ISAS])
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    library = library_limited_to(request.param)
    with library.limited_to(request.param):
        yield library


def row_of(size: int, seed: int, spread: float = 3.0, levels: int = 0) -> Floats:
    """``levels`` > 0: that many distinct values to each unit, so that many are equal."""
    draw = np.random.default_rng(seed)
    row = draw.normal(size=size).astype(np.float32) * np.float32(spread)
    return np.round(row * levels).astype(np.float32) / levels if levels else row


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 400},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p_offset": -2.0},
    {"min_p_offset": 0.0},
    {"top_k": 300, "min_p_offset": -6.0, "top_p": 0.7, "temperature": 1.4},
]


def check_draws(native: NativeSampling, row: Floats, case: dict[str, Any], draws: int = 40) -> None:
    """One row drawn at many places: ids are the reference's but where a draw falls on the border of
    two of them, and the share of each among the survivors is too."""
    reference, logits = NumpySampling(len(row)), row[None]
    uniforms = np.append(np.random.default_rng(len(row)).random(draws), EDGES)
    rules = np.zeros(len(uniforms), dtype=RULES)
    for name, value in (NO_RULES | case).items():
        rules[name] = value
    rules["top_k"] = np.minimum(rules["top_k"], len(row))
    rules["uniform"], rules["wants_log_prob"] = uniforms, 1
    same_rows = np.repeat(logits, len(uniforms), axis=0)
    ids, log_shares, maxima = native.sample_rows(same_rows, rules, normalize_log_probs=True)
    assert (maxima == row.max()).all()
    shares, slack = shares_of(reference, row, rules[0])
    # Where sums differ in their last bits a nucleus may have one more.
    known = shares[ids] > 0
    assert len(set(ids[~known].tolist())) <= (1 if slack else 0)
    ids, log_shares, uniforms = ids[known], log_shares[known], uniforms[known]
    # float32 sums of many thousand weights; and a nucleus may have one more, or one less
    np.testing.assert_allclose(np.exp(log_shares), shares[ids], rtol=1e-5 + slack, atol=1e-30)
    ends = np.cumsum(shares)[ids]
    assert (ends - shares[ids] <= uniforms + 1e-6 + slack).all()
    assert (uniforms <= ends + 1e-6 + slack).all()


def shares_of(reference: NumpySampling, row: Floats, rules: Any) -> tuple[Any, float]:
    """float64[V]: what each id has of all that survives. And the smallest share of a nucleus."""
    peak = float(row.max())
    ids, weights = reference.survivors(
        row,
        peak,
        temperature=float(rules["temperature"]),
        top_k=int(rules["top_k"]),
        top_p=float(rules["top_p"]),
        min_p_logit=peak + float(rules["min_p_offset"]),
    )
    shares = np.zeros(len(row))
    shares[slice(None) if ids is None else ids] = weights / weights.sum(dtype=np.float64)
    return shares, float(shares[ids].min()) if rules["top_p"] < 1 else 0.0


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [1, 65, 1201, 49_152])
def test_draws(library: NativeLibrary, case: dict[str, Any], size: int) -> None:
    for seed, levels in ((1, 0), (2, 3)):
        check_draws(NativeSampling(library), row_of(size, seed, levels=levels), case)


def test_draws_from_flat_peaked_and_masked_rows(library: NativeLibrary) -> None:
    flat, peaked = np.zeros(3000, dtype=np.float32), np.full(3000, -1e30, dtype=np.float32)
    peaked[7] = 1e30
    masked = row_of(3000, 4)
    masked[10:] = -np.inf
    far = row_of(3000, 5) + np.float32(1e6)  # a sixteenth between neighbouring logits
    for row in (flat, peaked, masked, far):
        for case in (
            {"top_p": 0.5},
            {"top_p": 0.99},
            {"top_k": 20, "top_p": 0.5},
            {"top_k": 5},
            {},
        ):
            check_draws(NativeSampling(library), row, case)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 4000),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.01, 1.0, 12.0]),
    levels=st.sampled_from([0, 1, 40]),
    top_k=st.none() | st.integers(1, 5000),
    top_p=st.none() | st.floats(0.001, 1.0),
    min_p_offset=st.none() | st.floats(-12, 0),
    temperature=st.none() | st.floats(0.05, 5),
)
def test_draws_by_random_rules(
    size: int, seed: int, spread: float, levels: int, **rules: float | None
) -> None:
    case = {name: value for name, value in rules.items() if value is not None}
    check_draws(NativeSampling(native_library()), row_of(size, seed, spread, levels), case, 10)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 63, 64, 65, 300, 1100, 3079, 49_152])
def test_the_likeliest_is_numpys_argmax(library: NativeLibrary, size: int) -> None:
    logits = np.stack([row_of(size, seed, levels=seed % 2) for seed in range(12)])
    logits[3] = -np.inf
    logits[4, size // 2] = np.inf
    logits[5, size // 3 :] = np.nan
    logits[6, -1] = np.nan
    logits[7, :] = np.nan
    logits[8, size // 2 :] = 1e30
    rows = np.array([*range(12), 5, 0])
    found = NativeSampling(library).likeliest(logits, rows)
    assert found.dtype == np.int32
    assert found.tolist() == logits.argmax(axis=1)[rows].tolist()


KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.8, "temperature": 1.3, "repetition_penalty": 1.2},
    {"bad_words": ((7,), (2, 8)), "logit_bias": {5: 3.0}},
]  # fmt: skip


def sample(
    kernels: SamplingKernels, logits: Floats, *, normalize: bool = False, only: int | None = None
) -> SampledTokens:
    """Row i by rules KINDS[i % 7], each other one with its log-prob; ``only``: that row alone."""
    sampler = Sampler(vocab_size=logits.shape[1], normalize_log_probs=normalize, kernels=kernels)
    chosen = range(len(logits)) if only is None else [only]
    requests = [
        make_request(i, seed=i, log_probs=i % 2 == 0, **KINDS[i % len(KINDS)]) for i in chosen
    ]
    for request in requests:
        sampler.add(request)
    return sampler.sample(sampler.rows(requests), logits[list(chosen)])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_sampler_chooses_the_same_tokens_with_either(normalize: bool) -> None:
    logits = np.stack([row_of(49_152, seed, 2.0) for seed in range(28)])
    logits[5, ::3] = np.nan
    logits[8, 99] = np.inf
    native = sample(NativeSampling(native_library()), logits, normalize=normalize)
    expected = sample(NumpySampling(49_152), logits, normalize=normalize)
    assert native.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(native.log_probs, expected.log_probs, rtol=1e-5, atol=1e-6)
    assert (native.log_probs[::2] != 0).any() and not native.log_probs[1::2].any()


def test_neither_company_nor_threads_move_a_draw() -> None:
    library = native_library()
    kernels, logits = NativeSampling(library), np.stack([row_of(20_000, i) for i in range(21)])
    together = sample(kernels, logits)
    for threads in (1, 3):
        library.set_num_threads(threads)
        try:
            again = sample(kernels, logits)
        finally:
            library.set_num_threads(torch.get_num_threads())
        assert again.token_ids.tolist() == together.token_ids.tolist()
        assert again.log_probs.tolist() == together.log_probs.tolist()
    for row in range(len(logits)):
        alone = sample(kernels, logits, only=row)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.log_probs[0] == together.log_probs[row]


@pytest.mark.parametrize("count", [0, 1, 33])
def test_uniforms_are_those_of_numpy(library: NativeLibrary, count: int) -> None:
    rng = np.random.default_rng(count)
    seeds, positions = rng.integers(0, 2**64 - 1, size=(2, count), dtype=np.uint64)
    seeds[::5], positions[::3] = 2**64 - 1, 2**64 - 2
    seeds[2::7], positions[2::9] = 0, 0
    draws = NativeSampling(library).uniforms(seeds, 3, positions)
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    alone = [CounterGenerator().uniform(seed, 3, position) for seed, position in pairs]
    assert draws.dtype == np.float64 and draws.tolist() == alone


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("distinct", [1, 3, 900])
def test_a_nucleus_takes_of_equal_weights_the_first(
    library: NativeLibrary, top_p: float, distinct: int
) -> None:
    """Many weights share the border's bucket, or are the border's weight."""
    row = np.random.default_rng(distinct).integers(0, distinct, 4000).astype(np.float32) * 1e-3
    check_draws(NativeSampling(library), row, {"top_p": top_p})
