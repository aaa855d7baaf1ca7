"""An engine is built once, by one process, and whole or not there; a damaged one is built again."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.engine_files.file import read_engine, write_engine
from inflight.engine_files.header import DATA_FILE, HEADER_FILE
from inflight.engine_files.key import EngineKey
from inflight.engine_files.store import OTHER_VERSIONS_KEPT, UNUSED_SECONDS, EngineStore
from inflight.errors import ConfigError
from tests.unit.engine_files.contents import Model, assert_same, make_key, make_model

ROOT = Path(__file__).parents[3]


def nobody_waits() -> None:
    raise AssertionError("nobody else builds it")


def read(folder: Path) -> Model:
    return read_engine(folder, Model)


class Builder:
    def __init__(self, key: EngineKey) -> None:
        self._key = key
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        write_engine(folder, self._key, make_model())


def build(store: EngineStore, key: EngineKey) -> Builder:
    builder = Builder(key)
    store.build(key, builder, on_wait=nobody_waits)
    return builder


def test_it_is_built_once(tmp_path: Path) -> None:
    store, key = EngineStore(str(tmp_path)), make_key()
    assert not store.has(key) and store.load(key, read) is None
    assert build(store, key).calls == 1
    assert build(store, key).calls == 0
    assert store.has(key)
    found = store.load(key, read)
    assert found is not None
    assert_same(found, make_model())


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    store, key = EngineStore(str(tmp_path)), make_key()

    def fail(folder: Path) -> None:
        write_engine(folder, key, make_model())
        raise ValueError("the proof failed")

    with pytest.raises(ValueError, match="the proof failed"):
        store.build(key, fail, on_wait=nobody_waits)
    assert not store.has(key) and [p.suffix for p in (tmp_path / "engines").iterdir()] == [".lock"]
    assert build(store, key).calls == 1


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_engine_is_said_and_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store, key = EngineStore(str(tmp_path)), make_key()
    build(store, key)
    path = store.folder(key) / DATA_FILE
    data = bytearray(path.read_bytes())
    data[40] ^= 8
    path.write_bytes(data[:-1] if damage == "cut" else data)
    with caplog.at_level(logging.WARNING):
        assert store.load(key, read) is None
    assert "is damaged, building it again" in caplog.text
    assert build(store, key).calls == 1
    assert store.load(key, read) is not None


def test_an_engine_that_cannot_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = EngineStore(str(tmp_path)), make_key()
    build(store, key)

    def refuse(path: Path, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("open", "read_text", "is_dir"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, refuse)
            with pytest.raises(ConfigError, match="cannot be read: .*: Permission denied"):
                store.load(key, read)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        with pytest.raises(ConfigError, match="Permission denied"):
            build(store, key)
    assert store.load(key, read) is not None


def test_an_engine_under_a_wrong_name_is_not_taken(tmp_path: Path) -> None:
    store, key, other = EngineStore(str(tmp_path)), make_key(), make_key(cpu="another")
    build(store, key)
    store.folder(key).rename(store.folder(other))
    assert not store.has(other) and store.load(other, read) is None
    assert build(store, other).calls == 1


def load(store: EngineStore, key: EngineKey) -> None:
    assert store.load(key, read) is not None


def age(store: EngineStore, key: EngineKey, seconds: float) -> None:
    """As if it had been loaded so long ago."""
    then = time.time() - seconds
    os.utime(store.folder(key) / HEADER_FILE, (then, then))


def test_two_versions_that_share_a_cache_build_once_each(tmp_path: Path) -> None:
    store, old, new = EngineStore(str(tmp_path)), make_key(), make_key(code="new")
    for key in (old, new):
        assert build(store, key).calls == 1
        load(store, key)
    for key in (old, new, old):
        assert build(store, key).calls == 0
        load(store, key)


def test_versions_used_last_are_kept_and_only_so_many(tmp_path: Path) -> None:
    store = EngineStore(str(tmp_path))
    versions = [make_key(code=f"version {number}") for number in range(OTHER_VERSIONS_KEPT + 2)]
    for number, key in enumerate(versions):
        build(store, key)
        age(store, key, 1000.0 - number)
    load(store, versions[0])  # the oldest build, and the one in use
    age(store, versions[0], 1.0)
    build(store, versions[-1])
    load(store, versions[-1])
    kept = [key for key in versions if store.has(key)]
    assert kept == [versions[0], *versions[-OTHER_VERSIONS_KEPT:]]


def test_a_version_goes_when_it_was_not_loaded_for_long(tmp_path: Path) -> None:
    store, old, new = EngineStore(str(tmp_path)), make_key(), make_key(code="new")
    others = [make_key(dtype="int8"), make_key(cpu="another"), make_key(checkpoint="another")]
    for key in (old, *others, new):
        build(store, key)
        age(store, key, UNUSED_SECONDS - 60)
    load(store, new)
    assert store.has(old)
    for key in (old, *others):
        age(store, key, UNUSED_SECONDS + 60)
    load(store, new)
    assert not store.folder(old).exists()
    assert all(store.has(key) for key in (*others, new))


def test_what_is_damaged_or_being_built_is_no_other_version(tmp_path: Path) -> None:
    store, new = EngineStore(str(tmp_path)), make_key(code="new")
    damaged, unfinished = make_key(code="damaged"), make_key(code="unfinished")
    for key in (new, damaged, unfinished):
        build(store, key)
        age(store, key, 2 * UNUSED_SECONDS)
    (store.folder(damaged) / HEADER_FILE).write_text("{")
    partial = store.folder(unfinished).with_suffix(".0.partial")
    store.folder(unfinished).rename(partial)
    with store.folder(unfinished).with_suffix(".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load(store, new)
    assert store.folder(damaged).is_dir() and partial.is_dir()
    load(store, new)
    assert not partial.exists(), "its builder was killed"


def test_the_reason_against_an_engine_is_remembered(tmp_path: Path) -> None:
    store, key = EngineStore(str(tmp_path)), make_key()
    assert store.reason_against(key) is None
    store.note_reason_against(key, "the fused runner does not know gpt2")
    assert store.reason_against(key) == "the fused runner does not know gpt2"
    assert store.reason_against(make_key(code="new")) is None


SLOW_BUILD = """
import sys, time
from pathlib import Path
from inflight.engine_files.file import write_engine
from inflight.engine_files.store import EngineStore
from tests.unit.engine_files.contents import make_key, make_model

def build(folder):
    (folder / "half").touch()
    print("started", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    write_engine(folder, make_key(), make_model())
    print("built", flush=True)

EngineStore(sys.argv[1]).build(
    make_key(), build, on_wait=lambda: print("waiting", flush=True)
)
print("done", flush=True)
"""


def start_building(cache: Path) -> subprocess.Popen[str]:
    """A builder that goes on when ``cache / "go"`` is there."""
    command = [sys.executable, "-c", SLOW_BUILD, str(cache), str(cache / "go")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    assert any(line.strip() == wanted for line in process.stdout), f"no {wanted!r}"


def test_two_builders_make_one_engine(tmp_path: Path) -> None:
    with start_building(tmp_path) as first:
        wait_for(first, "started")
        with start_building(tmp_path) as second:
            wait_for(second, "waiting")
            (tmp_path / "go").touch()
            outputs = [process.communicate(timeout=60)[0].split() for process in (first, second)]
    assert outputs == [["built", "done"], ["done"]]
    assert EngineStore(str(tmp_path)).has(make_key())


def test_a_killed_builder_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    with start_building(tmp_path) as process:
        wait_for(process, "started")
        process.send_signal(signal.SIGKILL)
    store, key = EngineStore(str(tmp_path)), make_key()
    assert not store.has(key) and list((tmp_path / "engines").glob("*.partial"))
    assert build(store, key).calls == 1
    assert store.load(key, read) is not None
    assert not list((tmp_path / "engines").glob("*.partial"))
