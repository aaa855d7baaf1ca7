"""What is proved without a card, in numbers: the parts of docs that are collected, not typed.

    python -m tests.interpreter.proved_without_card

writes docs/gpu.md and docs/performance.md anew between their marks. The cases are those of the
parametrization, the counts what pytest collects.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.interpreter.all_cases import CASES, coverage_lines, summary_lines

ROOT = Path(__file__).parents[2]
TABLES, SENTENCE = ROOT / "docs" / "gpu.md", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- collected: begin -->", "<!-- collected: end -->"
UNDER_THE_INTERPRETER = ("tests/interpreter/test_*.py",)
INTERPRETED = "interpreter and not gpu"
"""Of the tests that ``scripts/test -m interpreter`` runs, but for those that a card alone runs."""
ON_A_STAND_IN = (
    "tests/numeric/test_device_*.py",
    "tests/numeric/test_cuda_runtime.py",
    "tests/numeric/test_gpu_*.py",
    "tests/unit/gpu/test_*.py",
)
DEFAULT = "not slow and not gpu"
"""Of the tests that ``scripts/test`` runs."""


def pages() -> Iterator[tuple[Path, str]]:
    """Each of the two, as it has to be."""
    for path, lines in ((TABLES, tables()), (SENTENCE, sentence())):
        yield path, with_part(path.read_text(encoding="utf-8"), "\n".join(lines))


def tables() -> list[str]:
    interpreted = collected(UNDER_THE_INTERPRETER, INTERPRETED)
    stand_in = collected(ON_A_STAND_IN, DEFAULT)
    return [
        f"The {len(CASES)} cases of the kernels ([each of them](gpu_kernels.md)):",
        "",
        *summary_lines(CASES),
        "",
        f"`bash scripts/test -m interpreter` runs {sum(interpreted.values())} tests:",
        "",
        *_file_lines(interpreted),
        "",
        f"{sum(stand_in.values())} more run the device-neutral engine on a stand-in:",
        "",
        *_file_lines(stand_in),
    ]


def sentence() -> list[str]:
    interpreted = collected(UNDER_THE_INTERPRETER, INTERPRETED)
    stand_in = collected(ON_A_STAND_IN, DEFAULT)
    num_shapes = len(coverage_lines(CASES)) - 2  # without the head of the table
    kernels = {name for case in CASES for name in case.kernel.split(" + ")}
    return [
        f"Without a card {len(kernels)} kernels are held to torch references on {num_shapes} "
        f"shapes, {len(CASES)} cases with their",
        f"dtypes, among {sum(interpreted.values())} tests under the interpreter; "
        f"{sum(stand_in.values())} tests run the engine on a stand-in.",
    ]


def with_part(page: str, part: str) -> str:
    """``page`` with ``part`` between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"a page has lost {BEGIN} or {END}"
    return f"{before}{BEGIN}\n{part}\n{END}{after}"


@cache
def collected(patterns: tuple[str, ...], markers: str) -> Mapping[Path, int]:
    """How many tests of each file ``-m markers`` runs; files of which it runs none are left out."""
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", markers]
    command += ["-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    counts: dict[Path, int] = {}
    for line in done.stdout.splitlines():
        name, _, count = line.rpartition(": ")
        if count.isdigit() and ROOT / name in files:
            counts[ROOT / name] = int(count)
    if done.returncode or not counts:
        raise RuntimeError(f"nothing was collected: {done.stdout[-500:]}{done.stderr[-500:]}")
    return counts


def _file_lines(counts: Mapping[Path, int]) -> list[str]:
    rows = [
        f"| `{path.relative_to(ROOT)}` | {_first_paragraph(path)} | {count} |"
        for path, count in counts.items()
    ]
    return ["| file | what it shows | tests |", "|---|---|---|", *rows]


def _first_paragraph(path: Path) -> str:
    """Of what a file says of itself, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    for target, text in pages():
        target.write_text(text, encoding="utf-8")
