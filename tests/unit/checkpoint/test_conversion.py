"""The conversion process: found, started, and reported in one line when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.checkpoint.conversion import interpreter, run_conversion
from inflight.checkpoint.locate import Job
from inflight.errors import CheckpointError


def convert(source: Path, target: Path) -> list[str]:
    lines: list[str] = []
    target.mkdir()
    lock_fd = os.open(target.parent / "lock", os.O_RDWR | os.O_CREAT)
    try:
        run_conversion(Job.GGUF, source, target, lock_fd=lock_fd, progress=lines.append)
    finally:
        os.close(lock_fd)
    return lines


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "target")
    text = str(caught.value)
    assert text.startswith(f"model_dir: {source} cannot be converted: ")
    assert "\n" not in text and "Traceback" not in text and len(text) < 600


def test_a_process_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script, reason in {
        "kill -9 $$": "killed by signal 9",
        "echo Traceback >&2; echo the last line >&2; exit 3": "converted: the last line$",
        "exit 3": "ended with status 3",
        "exit 0": "ended with status 0",
    }.items():
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake))
        with pytest.raises(CheckpointError, match=reason):
            convert(tmp_path / "any.gguf", tmp_path / f"target{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("executable", ["", "/opt/backends/python/triton_python_backend_stub"])
def test_the_interpreter_is_a_python_also_inside_the_stub(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    code = "import sys; print(*sys.version_info[:2])"
    said = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(part) for part in sys.version_info[:2]]


def test_no_interpreter_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="a conversion needs python3"):
        interpreter()
