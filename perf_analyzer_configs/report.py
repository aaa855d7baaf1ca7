#!/usr/bin/env python3
"""What a profile export of perf_analyzer says about streams; fails if nothing was streamed.

perf_analyzer itself reports times for whole requests only.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def row(name: str, values: list[float]) -> str:
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    return f"{name:<28}{statistics.fmean(values):>9.1f}{p50:>9.1f}{p99:>9.1f}"


def report(requests: list[dict[str, Any]]) -> str:
    """Times in milliseconds. A response may carry several tokens, and the last one carries none."""
    first: list[float] = []
    gaps: list[float] = []
    whole: list[float] = []
    for request in requests:
        start, times = request["timestamp"], request["response_timestamps"]
        first.append((times[0] - start) / 1e6)
        whole.append((times[-1] - start) / 1e6)
        gaps += [(b - a) / 1e6 for a, b in zip(times[:-1], times[1:], strict=True)]
    if not gaps:
        sys.exit("report.py: no request had more than one response: nothing was streamed")
    count = sum(len(request["response_timestamps"]) for request in requests)
    return "\n".join(
        [
            f"{len(requests)} requests, {count} responses",
            f"{'milliseconds':<28}{'mean':>9}{'p50':>9}{'p99':>9}",
            row("to the first response", first),
            row("between responses", gaps),
            row("to the last response", whole),
        ]
    )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: report.py PROFILE_EXPORT.json")
    experiments = json.loads(Path(sys.argv[1]).read_text())["experiments"]
    for experiment in experiments:
        requests = [r for r in experiment["requests"] if r["response_timestamps"]]
        if not requests:
            sys.exit("report.py: no request was answered")
        print(f"concurrency {experiment['experiment']['value']}: {report(requests)}")


if __name__ == "__main__":
    main()
