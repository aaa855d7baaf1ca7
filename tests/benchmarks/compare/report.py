"""The figures for people: a table a workload, ratios with their spread, who disturbed whom."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.benchmarks.compare.systems import OURS

Row = Mapping[str, Any]

WHOLE_THROUGHPUT = ("W4", "W4off", "W5")
"""Workloads with hardly any output: prompt tokens count in their tokens a second."""
RESTING_SHARE = 0.02
"""More CPU than this of a run, and a loaded system did not rest."""
FOREIGN_SHARE = 0.05


def throughput_key(workload: str) -> str:
    return "total_tok_s" if workload in WHOLE_THROUGHPUT else "output_tok_s"


def print_workload(rows: Sequence[Row], limit_seconds: float, say: Callable[[str], None]) -> None:
    """The rows of one workload. Ratios are ours over each peer's, of the runs that followed each
    other."""
    name = rows[0]["workload"]
    key = throughput_key(name)
    tokens = "prompt + output tokens/s" if name in WHOLE_THROUGHPUT else "output tokens/s"
    ours = next((row for row in rows if row["peer"] == OURS[0]), None)
    say(f"\n{name}: {tokens}; no faster than {limit_seconds:.2f} s on this machine")
    heads = ("system", "weights", "tokens/s", "spread", "TTFT p50", "ITL p50", "ITL p99")
    say(f"{heads[0]:18}{heads[1]:>8}" + "".join(f"{h:>10}" for h in heads[2:]) + "  of limit  ours")
    for row in rows:
        median = row["median"]
        share = limit_seconds / median["wall_s"]
        times = [_milliseconds(median[k]) for k in ("ttft_p50", "itl_p50", "itl_p99")]
        ratio = "" if ours is None or row is ours else describe_ratio(ratios(ours, row))
        line = (
            f"{row['peer']:18}{row['dtype']:>8}{median[key]:>10.1f}{row['spread_wall']:>10.0%}"
            + "".join(f"{time:>10}" for time in times)
            + f"{share:>10.0%}  {ratio}"
        )
        say(line.rstrip())
        if not median["exact_lengths"]:
            say(f"  {row['peer']}: WRONG NUMBER OF TOKENS: not comparable")


def ratios(ours: Row, other: Row) -> list[float]:
    """Other's time over ours, run by run: above 1, ours is faster."""
    return [b["wall_s"] / a["wall_s"] for a, b in zip(ours["runs"], other["runs"], strict=False)]


def describe_ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}x ({min(values):.2f}-{max(values):.2f})"


def disturbances(name: str, seconds: float, rested_s: float, foreign_s: float) -> list[str]:
    """Lines that say why a run may not count."""
    lines = []
    if rested_s > RESTING_SHARE * seconds:
        lines.append(f"{name}: loaded systems used {rested_s:.1f} s of CPU while it ran")
    if foreign_s > FOREIGN_SHARE * seconds:
        lines.append(f"{name}: other processes used {foreign_s:.1f} s of CPU in {seconds:.1f} s")
    return lines


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
