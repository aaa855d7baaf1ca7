"""Renders the tables of docs/requests.md from the contract.

``python -m inflight.tritonserver.request_table docs/requests.md`` puts them between the two markers
of that page; a test keeps the committed page current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from inflight.errors import ConfigError
from inflight.tritonserver.contract import (
    OUTPUTS,
    SERVED_INPUTS,
    UNSERVED,
    InputField,
    Refusal,
    vllm,
)
from inflight.tritonserver.contract.refused import REFUSED

BEGIN = "<!-- tables: written by python -m inflight.tritonserver.request_table -->"
END = "<!-- end of tables -->"


def render() -> str:
    """All tables, as Markdown."""
    return "\n".join(
        [
            "### Inputs\n",
            _table(
                ("name", "type", "range", "default", "meaning", "elsewhere"),
                [_served_row(entry) for entry in SERVED_INPUTS],
            ),
            "### Known inputs that are refused\n",
            _table(
                ("name", "type", "accepted", "reason"),
                [_refused_row(entry) for entry in REFUSED],
            ),
            "### Outputs\n",
            _table(
                ("name", "type", "sent", "meaning", "elsewhere"),
                [
                    (
                        f"`{output.name}`" + ("" if output.on_ensemble else " (inflight_llm)"),
                        _type(output.dtype.value, output.dims),
                        output.sent_when,
                        output.meaning,
                        output.equals or "same name",
                    )
                    for output in OUTPUTS
                ],
            ),
            "### Known outputs that no model has\n",
            _table(("name", "reason"), [(f"`{name}`", reason) for name, reason in UNSERVED]),
            "### Keys of sampling_parameters with a name or rule of their own\n",
            _table(
                ("key", "meaning"),
                [
                    *((f"`{key}`", renamed.meaning) for key, renamed in vllm.RENAMED.items()),
                    *((f"`{key}`", _refusal(r)) for key, r in vllm.REFUSED.items()),
                ],
            ),
        ]
    )


def updated(page: str) -> str:
    """``page`` with its tables replaced; raises ConfigError where a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


def _served_row(entry: InputField) -> Sequence[str]:
    return (
        _names(entry),
        _type(entry.dtype.value, entry.dims),
        entry.range,
        entry.default,
        entry.meaning,
        entry.equals or "same name",
    )


def _refused_row(entry: InputField) -> Sequence[str]:
    assert entry.refusal is not None
    accepted = ", ".join(_shown(value) for value in entry.refusal.neutral)
    return (
        _names(entry),
        _type(entry.dtype.value, entry.dims),
        accepted or "nothing",
        entry.refusal.reason,
    )


def _names(entry: InputField) -> str:
    """Every name, with the places where only some of them count."""
    groups = (
        (entry.text_names, ""),
        (entry.ids_names, " (inflight_llm)"),
        (entry.parameter_names, " (parameter)"),
    )
    return ", ".join(f"`{name}`{place}" for names, place in groups for name in names)


def _type(dtype: str, dims: Iterable[int]) -> str:
    return f"{dtype} [{', '.join(map(str, dims))}]"


def _refusal(refusal: Refusal) -> str:
    accepted = " or ".join(_shown(value) for value in refusal.neutral)
    return f"refused{f' unless {accepted}' if accepted else ''}: {refusal.reason}"


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def main(arguments: Sequence[str]) -> int:
    """Rewrites the tables of the page named by the one argument."""
    if len(arguments) != 1:
        print("usage: python -m inflight.tritonserver.request_table PAGE")
        return 2
    path = Path(arguments[0])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
