"""The suite's result as a table for the terminal, as Markdown for docs/performance.md, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.gpu.rows import Outcome, Row

_HEAD = ("stage", "what", "result", "value", "ceiling", "share", "asked", "note")
_WIDEST = (20, 46, 8, 16, 16, 6, 6, 80)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``stages``: title to rows, in the order in which they ran."""

    date: str
    card: str
    """The card, or the processor of a run without one."""
    seconds: float
    stages: Mapping[str, Sequence[Row]]

    def count(self, outcome: Outcome) -> int:
        return sum(row.judged is outcome for rows in self.stages.values() for row in rows)

    def summary(self) -> str:
        counts = ", ".join(f"{self.count(outcome)} {outcome.value}" for outcome in Outcome)
        return f"{self.date}, {self.card}: {counts}, in {self.seconds:.0f} s"


def as_text(report: Report) -> str:
    """Columns as wide as they need, the summary below them."""
    table = [_HEAD, *_cells(report)]
    cut = [[_cut(cell, most) for cell, most in zip(line, _WIDEST, strict=True)] for line in table]
    widths = [max(len(line[column]) for line in cut) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cut
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, "", report.summary()])


def as_markdown(report: Report) -> str:
    """A heading with date and card, and the table."""
    lines = [f"### {report.card}, {report.date}", ""]
    lines += [f"`bash tests/gpu/run.sh`, {report.seconds:.0f} s.", ""]
    lines += ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    for cells in _cells(report):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> str:
    """Every row, none folded, with ``stage``, ``share`` and the judged ``outcome``."""
    rows = [
        asdict(row) | {"stage": title, "share": row.share, "outcome": row.judged.value}
        for title, rows in report.stages.items()
        for row in rows
    ]
    head = {"date": report.date, "card": report.card, "seconds": round(report.seconds, 1)}
    return json.dumps(head | {"rows": rows}, indent=1) + "\n"


def _cells(report: Report) -> list[tuple[str, ...]]:
    """Checks that only say ok are folded into one line for each stage: there are hundreds."""
    lines: list[tuple[str, ...]] = []
    for title, rows in report.stages.items():
        plain = [r for r in rows if r.judged is Outcome.OK and r.value is None and not r.note]
        if plain:
            noun = "check" if len(plain) == 1 else "checks"
            what = plain[0].what if len(plain) == 1 else f"{len(plain)} {noun}"
            lines.append((title, what, Outcome.OK.value, "", "", "", "", ""))
        lines += [_line(title, row) for row in rows if row not in plain]
    return lines


def _line(title: str, row: Row) -> tuple[str, ...]:
    asked = ""
    if row.target is not None:
        asked = _number(row.target) if row.ceiling is None else f"{row.target:.0%}"
    return (
        title,
        row.what,
        row.judged.value,
        _quantity(row.value, row.unit),
        _quantity(row.ceiling, row.unit),
        "" if row.share is None else f"{row.share:.0%}",
        asked,
        " ".join(row.note.split()),
    )


def _quantity(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {unit}".rstrip()


def _number(value: float) -> str:
    """Three digits that mean something, and no exponent where people read on."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
