"""What was measured: token times of a run, its figures, and the rows of the result file.

Standard library only. The keys of a row and of a run are those of the harness that the peers were
first measured with, so that its tools read our files and ours read its.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from tests.benchmarks.compare.workloads import Workload

Figures = dict[str, Any]


@dataclass
class Record:
    """One request; times are seconds since the run began."""

    job_id: int
    submitted: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """One for each token as it reached the client; several may have come together."""

    def tokens_came(self, count: int, now: float) -> None:
        self.token_times += [now] * count


@dataclass
class Run:
    """One workload, served once."""

    seconds: float
    records: list[Record]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(loaded: Mapping[str, Any]) -> Run:
        return Run(loaded["seconds"], [Record(**record) for record in loaded["records"]])


def figures_of(workload: Workload, run: Run, load_before: float) -> Figures:
    """The figures of one run; seconds, and tokens a second. A figure that is not there is None.

    ``load_before``: the machine's load average before the run.
    """
    times = {record.job_id: record.token_times for record in run.records}
    starts = {record.job_id: record.submitted for record in run.records}
    firsts = [t[0] - starts[job_id] for job_id, t in times.items() if t]
    gaps = [later - earlier for t in times.values() for earlier, later in pairwise(t)]
    rates = [(len(t) - 1) / (t[-1] - t[0]) for t in times.values() if len(t) > 1 and t[-1] > t[0]]
    num_output = sum(len(t) for t in times.values())
    exact = all(len(times.get(job.job_id, ())) == job.max_tokens for job in workload.jobs)
    return {
        "wall_s": run.seconds,
        "n_requests": len(workload.jobs),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": num_output,
        "exact_lengths": exact,
        "output_tok_s": num_output / run.seconds,
        "total_tok_s": (num_output + workload.num_prompt_tokens) / run.seconds,
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
        "itl_max": max(gaps, default=None),
        "decode_tok_s_per_seq": statistics.median(rates) if rates else None,
        "loadavg_before": load_before,
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest values; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def medians(runs: Sequence[Figures]) -> Figures:
    """Key by key over the runs that have the figure; lengths are exact if those of all are."""
    made: Figures = {}
    for key in runs[0]:
        values = [run[key] for run in runs if run[key] is not None]
        made[key] = statistics.median(values) if values else None
    made["exact_lengths"] = all(run["exact_lengths"] for run in runs)
    return made


def spread(runs: Sequence[Figures]) -> float:
    """(slowest - fastest) / median of the wall times."""
    walls: list[float] = [run["wall_s"] for run in runs]
    return (max(walls) - min(walls)) / statistics.median(walls)


def make_row(
    system: Mapping[str, Any], workload_name: str, runs: Sequence[Figures]
) -> dict[str, Any]:
    """A row of the result file; ``system`` has peer, version, label, dtype, load_s, settings."""
    return {
        "peer": system["peer"],
        "version": system["version"],
        "label": system["label"],
        "dtype": system["dtype"],
        "workload": workload_name,
        "median": medians(runs),
        "spread_wall": spread(runs),
        "runs": list(runs),
        "load_s": system["load_s"],
        "settings": system["settings"],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
