"""Every module of tests/benchmarks and tests/gpu imports, and each script answers ``--help``.

Nothing else runs them without being asked, so a name that has moved would be found by nobody.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.numeric

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "gpu") if find_spec("triton") else ("benchmarks",)

START_EACH = """
import contextlib, importlib, io, json, sys, traceback

def answer(name):
    module = importlib.import_module(name)
    if not hasattr(module, "argparse"):
        return "imported"
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        module.main()
        return "it does not heed --help"
    return said.getvalue()

for name in sys.argv[1:]:
    try:
        print(json.dumps([name, answer(name)]))
    except Exception:
        print(json.dumps([name, traceback.format_exc()]))
"""


def modules_in(folder: str) -> dict[str, Path]:
    """By their names for ``import``."""
    files = sorted((ROOT / "tests" / folder).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


def is_script(file: Path) -> bool:
    return '"__main__"' in file.read_text(encoding="utf-8")


def test_each_module_imports_and_each_script_answers() -> None:
    modules = {name: file for folder in FOLDERS for name, file in modules_in(folder).items()}
    done = subprocess.run(
        [sys.executable, "-c", START_EACH, *modules],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    answers = dict(json.loads(line) for line in done.stdout.splitlines())
    assert answers.keys() == modules.keys()
    wrong = {
        name: answer
        for name, answer in answers.items()
        if answer != "imported" and not answer.startswith("usage: ")
    }
    assert not wrong
    benchmarks = [file for file in (ROOT / "tests/benchmarks").glob("*.py") if is_script(file)]
    scripts = {f"tests.benchmarks.{file.stem}" for file in benchmarks}
    assert not {name for name in scripts if answers[name] == "imported"}, "they have no --help"
