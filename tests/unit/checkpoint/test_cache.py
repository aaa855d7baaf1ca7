"""A conversion is made once, by one process, and is whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.checkpoint import hashes
from inflight.checkpoint.cache import ConversionCache
from inflight.checkpoint.locate import Job
from inflight.errors import CheckpointError
from tests.unit.checkpoint.folders import make_folder


class CountingConverter:
    """Copies the source's bytes into config.json."""

    def __init__(self) -> None:
        self.calls: list[Job] = []

    def __call__(
        self,
        job: Job,
        source: Path,
        target: Path,
        *,
        lock_fd: int,
        progress: Callable[[str], None],
    ) -> None:
        self.calls.append(job)
        progress("working")
        if source.is_file():
            (target / "config.json").write_bytes(source.read_bytes())


def make_source(tmp_path: Path, content: bytes = b"GGUF one") -> Path:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(content)
    return source


def silent(line: str) -> None:
    pass


def test_the_same_content_is_converted_once(tmp_path: Path) -> None:
    convert, lines = CountingConverter(), list[str]()
    cache = ConversionCache(str(tmp_path / "cache"), progress=lines.append, convert=convert)
    source = make_source(tmp_path)
    first = cache.converted(Job.GGUF, source)
    assert (first / "config.json").read_bytes() == b"GGUF one"
    assert lines == ["converting tiny.gguf (once)", "working"]
    moved = source.rename(tmp_path / "renamed.gguf")
    assert cache.converted(Job.GGUF, moved) == first
    assert len(convert.calls) == 1 and len(lines) == 2


def test_other_content_and_other_jobs_are_other_conversions(tmp_path: Path) -> None:
    convert = CountingConverter()
    cache = ConversionCache(str(tmp_path / "cache"), progress=silent, convert=convert)
    folder = make_folder(tmp_path / "tiny")
    found = {
        cache.converted(Job.GGUF, make_source(tmp_path)),
        cache.converted(Job.GGUF, make_source(tmp_path, b"GGUF two")),
        cache.converted(Job.TOKENIZER, folder),
        cache.converted(Job.CONFIG, folder),
    }
    (folder / "special_tokens_map.json").write_text("{}")
    found.add(cache.converted(Job.TOKENIZER, folder))
    assert len(found) == len(convert.calls) == 5


def test_a_large_file_is_read_again_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = CountingConverter()
    cache = ConversionCache(str(tmp_path / "cache"), progress=silent, convert=convert)
    source = make_source(tmp_path, b"GGUF" + bytes(2 << 20))
    first = cache.converted(Job.GGUF, source)
    status = source.stat()

    read: list[Path] = []
    monkeypatch.setattr(hashes, "_sha256_of_file", lambda path: read.append(path) or "other")
    assert cache.converted(Job.GGUF, source) == first and read == []

    source.write_bytes(b"GGUF" + b"\1" * (2 << 20))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.converted(Job.GGUF, source) != first, "its old time does not hide a change"
    assert read == [source]


def test_a_failure_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(job: Job, source: Path, target: Path, **_: object) -> None:
        (target / "config.json").write_text("half")
        raise CheckpointError("no")

    source, place = make_source(tmp_path), str(tmp_path / "cache")
    with pytest.raises(CheckpointError, match="^no$"):
        ConversionCache(place, progress=silent, convert=fail).converted(Job.GGUF, source)
    checkpoints = tmp_path / "cache" / "checkpoints"
    assert [path.suffix for path in checkpoints.iterdir() if path.name != "hashes"] == [".lock"]
    convert = CountingConverter()
    cache = ConversionCache(place, progress=silent, convert=convert)
    assert cache.converted(Job.GGUF, source).is_dir() and len(convert.calls) == 1


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    cache = ConversionCache(str(tmp_path / "cache"), progress=silent, convert=CountingConverter())
    with pytest.raises(CheckpointError, match="^cache_dir: .*/cache"):
        cache.converted(Job.GGUF, make_source(tmp_path))


SLOW_PROCESS = """
import sys, time
from pathlib import Path
from inflight.checkpoint.cache import ConversionCache
from inflight.checkpoint.locate import Job

def convert(job, source, target, *, lock_fd, progress):
    (target / "half").touch()
    print("started", flush=True)
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    (target / "config.json").write_text("{}")

cache = ConversionCache(sys.argv[1], progress=lambda line: print(line, flush=True), convert=convert)
print(cache.converted(Job.GGUF, Path(sys.argv[2])), flush=True)
"""


def start_process(tmp_path: Path) -> subprocess.Popen[str]:
    """A conversion that goes on when ``tmp_path / "go"`` is there."""
    places = [str(tmp_path / name) for name in ("cache", "tiny.gguf", "go")]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_PROCESS, *places], stdout=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if wanted in line:
            return
    raise AssertionError(f"the process ended without {wanted!r}")


def test_two_processes_wait_for_one_conversion(tmp_path: Path) -> None:
    make_source(tmp_path)
    with start_process(tmp_path) as first:
        wait_for_line(first, "started")
        with start_process(tmp_path) as second:
            wait_for_line(second, "waiting for another process that converts tiny.gguf")
            (tmp_path / "go").touch()
            outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert outputs[0] == outputs[1] and Path(outputs[0].strip()).is_dir()


def test_what_a_killed_process_left_is_never_used(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    with start_process(tmp_path) as process:
        wait_for_line(process, "started")
        process.send_signal(signal.SIGKILL)
    checkpoints = tmp_path / "cache" / "checkpoints"
    (left_over,) = checkpoints.glob("*.partial")
    assert (left_over / "half").exists()

    convert = CountingConverter()
    cache = ConversionCache(str(tmp_path / "cache"), progress=silent, convert=convert)
    start = time.monotonic()
    made = cache.converted(Job.GGUF, source)
    assert time.monotonic() - start < 10, "the lock of a dead process is free"
    assert len(convert.calls) == 1 and not (made / "half").exists()
    assert list(checkpoints.glob("*.partial")) == []
