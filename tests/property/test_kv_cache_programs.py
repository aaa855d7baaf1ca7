"""Random programs against a store whose content shows any block that points to a wrong place."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import KvCacheConfig
from inflight.kv_cache import KvCacheManager, KvExtent, PrefixIdentity
from tests.fakes.kv_program_tally import Tally
from tests.fakes.kv_programs import KvProgram

NUM_STEPS = 25


ALL_KEPT: tuple[int | None, ...] = (None,)
NOT_WITH_WINDOWS = {"onboarded"}
ONLY_WITH_WINDOWS = {"passed", "reused_windows"}


def run_programs(
    first_seed: int, count: int, windows: Sequence[tuple[int | None, ...]] = (ALL_KEPT,)
) -> Tally:
    """``windows``: in turn, those of a program's pools."""
    tally = Tally()
    for seed in range(first_seed, first_seed + count):
        try:
            KvProgram(Random(seed), tally, windows[seed % len(windows)]).run(NUM_STEPS)
        except BaseException as error:
            raise AssertionError(f"program of seed {seed}") from error
    return tally


@pytest.mark.parametrize("batch", range(4))
def test_two_thousand_programs(batch: int) -> None:
    tally = run_programs(batch * 1000, 500)
    assert min(n for name, n in vars(tally).items() if name not in ONLY_WITH_WINDOWS) > 10, tally


@pytest.mark.parametrize(
    "windows",
    [[(1,), (2,), (3,), (5,), (8,)], [(None, 2), (None, 4), (None, 1, 6), (3, 7)]],
    ids=["one pool", "several pools"],
)
def test_five_hundred_programs_with_windows(windows: list[tuple[int | None, ...]]) -> None:
    tally = run_programs(10_000, 500, windows)
    assert min(n for name, n in vars(tally).items() if name not in NOT_WITH_WINDOWS) > 10, tally


@pytest.mark.slow
def test_twenty_thousand_programs() -> None:
    windows: list[tuple[int | None, ...]] = [ALL_KEPT, ALL_KEPT, (4,), (None, 3), (None, 1, 6)]
    assert run_programs(1_000_000, 20_000, windows).steps == 20_000 * NUM_STEPS


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([ALL_KEPT, (3,), (None, 2)]))
def test_programs_that_shrink(rng: Random, windows: tuple[int | None, ...]) -> None:
    """The same programs, found and made small by hypothesis."""
    tally = Tally()
    KvProgram(rng, tally, windows).run(NUM_STEPS)
    assert tally.steps == NUM_STEPS


@settings(max_examples=150, deadline=None)
@given(
    tokens_per_block=st.integers(1, 4),
    parts=st.booleans(),
    programs=st.lists(
        st.tuples(
            st.sampled_from([None, "", "tenant"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=14),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_a_match_is_the_longest_prefix_that_was_ever_computed(
    tokens_per_block: int, parts: bool, programs: list[tuple[str | None, list[int], bool]]
) -> None:
    """In a pool that never evicts: against a set of every prefix. Parts count once their request
    has ended."""
    config = KvCacheConfig(tokens_per_block=tokens_per_block, enable_partial_reuse=parts)
    kv = KvCacheManager(200, config)
    computed: set[tuple[str | None, tuple[int, ...]]] = set()
    for request_id, (salt, tokens, stays) in enumerate(programs):
        array = np.array(tokens, dtype=np.int32)
        kv.open(request_id, PrefixIdentity(salt))
        expected = max(
            (n for n in range(len(tokens)) if (salt, tuple(tokens[:n])) in computed), default=0
        )
        assert kv.match_prefix(request_id, array).num_tokens == expected
        plan = [KvExtent(request_id, expected, array)]
        kv.reserve(plan)
        kv.commit(plan)
        num_full = len(tokens) // tokens_per_block * tokens_per_block
        lengths = range(1, (num_full if stays else len(tokens)) + 1)
        computed.update(
            (salt, tuple(tokens[:n])) for n in lengths if parts or n % tokens_per_block == 0
        )
        if not stays:
            kv.close(request_id)
        kv.check_integrity()
