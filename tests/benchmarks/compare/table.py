"""Result files as Markdown for docs/performance.md.

    python -m tests.benchmarks.compare.table FILE...

Rows of the first harness are read too; they have no limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.report import describe_ratio, ratios, throughput_key
from tests.benchmarks.compare.systems import OURS
from tests.benchmarks.compare.workloads import NAMES

HEAD = (
    "| workload | system | weights | tokens/s (range) | TTFT p50 | between tokens p50 / p99 "
    "| of the limit | ours is |"
)


def markdown(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of one table of the rows of one run."""
    ordered = sorted(rows, key=lambda row: NAMES.index(row["workload"]))
    ours = {row["workload"]: row for row in ordered if row["peer"] == OURS[0]}
    lines = [HEAD, "|" + "---|" * HEAD.count(" |")]
    for row in ordered:
        name = row["workload"]
        compared = name in ours and row is not ours[name]
        lines.append(_line(row, describe_ratio(ratios(ours[name], row)) if compared else ""))
    return lines


def _line(row: Mapping[str, Any], ratio: str) -> str:
    median, key = row["median"], throughput_key(row["workload"])
    speeds = [run[key] for run in row["runs"]]
    least = row["settings"].get("limits", {}).get("least_s")
    cells: Sequence[str] = (
        row["workload"],
        " ".join(part for part in (row["peer"], row["label"]) if part),
        row["dtype"],
        f"{median[key]:.1f} ({min(speeds):.1f}-{max(speeds):.1f})",
        _milliseconds(median["ttft_p50"]),
        f"{_milliseconds(median['itl_p50'])} / {_milliseconds(median['itl_p99'])}",
        "" if least is None else f"{least / median['wall_s']:.0%}",
        ratio,
    )
    return "| " + " | ".join(cells) + " |"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    for file in parser.parse_args().files:
        print("\n".join(markdown(json.loads(file.read_text(encoding="utf-8")))) + "\n")


if __name__ == "__main__":
    main()
