"""The workloads are those that the peers were measured with: token by token, by their hashes."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.benchmarks.compare.workloads import NAMES, Workload, make_workload, warm_up_of

HASHES = {
    ("W1", 1): "fbc0a25e25ea9532",
    ("W2c8", 1): "57ec395eed9ba3d9",
    ("W2c32", 1): "b5cc4d181e456921",
    ("W3", 0): "ed522a0a290eb7cd",
    ("W4", 1): "b65077860d58f1c5",
    ("W4off", 1): "b65077860d58f1c5",
    ("W5", 1): "506d032f7015586b",
}
"""Of the first harness's requests, as JSON [[prompt, max_tokens], ...]."""


def hash_of(workload: Workload) -> str:
    listed = [(job.prompt, job.max_tokens) for job in workload.jobs]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "salt"), HASHES)
def test_token_ids_are_those_of_the_first_harness(name: str, salt: int) -> None:
    assert hash_of(make_workload(name, salt)) == HASHES[name, salt]


@pytest.mark.parametrize("name", NAMES)
def test_a_salt_changes_the_ids_and_not_the_lengths(name: str) -> None:
    first, second = make_workload(name, 0), make_workload(name, 1)
    assert hash_of(first) != hash_of(second)
    lengths = [[(len(j.prompt), j.max_tokens) for j in w.jobs] for w in (first, second)]
    assert lengths[0] == lengths[1]


def test_the_mixed_workload_is_mostly_short() -> None:
    mixed = make_workload("W3", 5)
    assert (len(mixed.jobs), mixed.concurrency) == (64, 16)
    assert sum(job.max_tokens > 64 for job in mixed.jobs) == 6
    assert (mixed.num_prompt_tokens, mixed.num_output_tokens) == (16754, 3997)


def test_only_w4_reuses_its_shared_prefix() -> None:
    reusing = [name for name in NAMES if make_workload(name, 0).reuses_prefixes]
    assert reusing == ["W4"]
    shared = make_workload("W4", 3)
    prefixes = {job.prompt[: shared.shared_tokens] for job in shared.jobs}
    assert len(prefixes) == 1
    assert len({job.prompt for job in shared.jobs}) == 32


@pytest.mark.parametrize("name", NAMES)
def test_warming_up_gives_no_prefix_of_a_timed_prompt_away(name: str) -> None:
    warm = {job.prompt[:32] for job in warm_up_of(name).jobs}
    timed = {job.prompt[:32] for salt in range(5) for job in make_workload(name, salt).jobs}
    assert not warm & timed


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="W9"):
        make_workload("W9", 0)
