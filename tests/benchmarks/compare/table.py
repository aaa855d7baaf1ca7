"""Result files as Markdown for docs/performance.md, and as one picture.

    python -m tests.benchmarks.compare.table FILE... [--png PICTURE --title TEXT]

Rows of the first harness are read too; they have no limit, and are not in the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.picture import INSTALL_LINE, draw, has_matplotlib
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


def draw_rows(rows: Iterable[Mapping[str, Any]], title: str, target: Path) -> None:
    """The picture of stored rows, each workload with its own limit."""
    known = [row for row in rows if _least_seconds(row) is not None]
    known.sort(key=lambda row: NAMES.index(row["workload"]))
    draw(known, {row["workload"]: _least_seconds(row) or 0.0 for row in known}, title, target)


def _least_seconds(row: Mapping[str, Any]) -> float | None:
    least: float | None = row["settings"].get("limits", {}).get("least_s")
    return least


def _line(row: Mapping[str, Any], ratio: str) -> str:
    median, key = row["median"], throughput_key(row["workload"])
    speeds = [run[key] for run in row["runs"]]
    least = _least_seconds(row)
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
    parser.add_argument("--png", type=Path, help="where to draw the rows of all files")
    parser.add_argument("--title", default="", help="of the picture")
    asked = parser.parse_args()
    if asked.png and not has_matplotlib():
        parser.exit(2, f"{INSTALL_LINE}\n")
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in asked.files]
    for rows in runs:
        print("\n".join(markdown(rows)) + "\n")
    if asked.png:
        draw_rows([row for rows in runs for row in rows], asked.title, asked.png)


if __name__ == "__main__":
    main()
