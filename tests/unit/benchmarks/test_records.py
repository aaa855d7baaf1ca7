"""Figures of a run, and rows with the keys of the harness that the peers were first measured by."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.compare.records import (
    Figures,
    Record,
    Run,
    figures_of,
    make_row,
    medians,
    quantile,
    spread,
)
from tests.benchmarks.compare.workloads import Job, Workload

ROW_KEYS = [
    *("peer", "version", "label", "dtype", "workload", "median", "spread_wall", "runs", "load_s"),
    *("settings", "time"),
]
RUN_KEYS = [
    *("wall_s", "n_requests", "prompt_tokens", "output_tokens", "exact_lengths", "output_tok_s"),
    *("total_tok_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_max"),
    *("decode_tok_s_per_seq", "loadavg_before"),
]
TWO_JOBS = Workload("W2c8", (Job(0, (5, 6, 7), 3), Job(1, (8,), 1)), concurrency=2)


def run_of(*token_times: list[float]) -> Run:
    return Run(4.0, [Record(place, 0.5, times) for place, times in enumerate(token_times)])


def test_figures_of_a_run_by_hand() -> None:
    figures = figures_of(TWO_JOBS, run_of([1.0, 1.5, 3.5], [2.5]), load_before=0.25)
    assert list(figures) == RUN_KEYS
    assert figures == {
        "wall_s": 4.0,
        "n_requests": 2,
        "prompt_tokens": 4,
        "output_tokens": 4,
        "exact_lengths": True,
        "output_tok_s": 1.0,
        "total_tok_s": 2.0,
        "ttft_p50": 1.25,  # 0.5 and 2.0 after they were submitted
        "ttft_p99": pytest.approx(1.985),
        "itl_p50": 1.25,  # gaps of 0.5 and 2.0
        "itl_p99": pytest.approx(1.985),
        "itl_max": 2.0,
        "decode_tok_s_per_seq": 0.8,
        "loadavg_before": 0.25,
    }


@pytest.mark.parametrize(
    "token_times",
    [
        ([1.0, 2.0], [1.0]),  # one too few
        ([1.0, 2.0], [1.0, 2.0]),  # the right sum of the wrong requests
        ([1.0, 2.0, 3.0],),  # a request without a record
    ],
)
def test_wrong_lengths_are_seen(token_times: tuple[list[float], ...]) -> None:
    assert figures_of(TWO_JOBS, run_of(*token_times), 0.0)["exact_lengths"] is False


def test_one_token_has_no_gaps() -> None:
    one = Workload("W5", (Job(0, (1, 2), 1),), concurrency=1)
    figures = figures_of(one, run_of([2.0]), 0.0)
    assert [figures[k] for k in ("itl_p50", "itl_max", "decode_tok_s_per_seq")] == [None] * 3


def test_tokens_that_came_together_have_one_time() -> None:
    record = Record(0)
    record.tokens_came(1, 0.5)
    record.tokens_came(3, 0.75)
    record.tokens_came(0, 0.9)
    assert record.token_times == [0.5, 0.75, 0.75, 0.75]


def test_quantiles_lie_between_the_nearest_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert quantile([], 0.5) is None


def figures(wall: float, gap: float | None, exact: bool = True) -> Figures:
    made = dict.fromkeys(RUN_KEYS, 1.0)
    return made | {"wall_s": wall, "itl_p50": gap, "exact_lengths": exact}


def test_a_row_has_the_keys_of_the_first_harness() -> None:
    about = {"peer": "inflight", "version": "v", "label": "", "dtype": "bf16", "load_s": 1.0}
    runs = [figures(2.0, None), figures(4.0, 0.1), figures(3.0, 0.3)]
    row = make_row(about | {"settings": {"a": 1}}, "W1", runs)
    assert list(row) == ROW_KEYS
    assert row["median"]["wall_s"] == 3.0
    assert row["median"]["itl_p50"] == pytest.approx(0.2)
    assert row["spread_wall"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(row)) == row


def test_one_wrong_run_makes_the_row_inexact() -> None:
    assert medians([figures(1.0, 1.0), figures(1.0, 1.0, exact=False)])["exact_lengths"] is False
    assert medians([figures(1.0, 1.0)] * 2)["exact_lengths"] is True


def test_no_spread_of_one_run() -> None:
    assert spread([figures(2.0, None)]) == 0.0


def test_a_run_survives_the_way_from_the_worker() -> None:
    run = run_of([1.0, 2.5], [])
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run
