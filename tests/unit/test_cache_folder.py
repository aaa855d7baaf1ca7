"""A folder of the cache is made once and whole, also where its place is not left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from inflight.cache_folder import cache_root, discard, make_once, remove_leftovers
from inflight.errors import ConfigError


def nobody_waits() -> None:
    raise AssertionError("nobody else makes it")


def write(text: str) -> Callable[[Path, int], None]:
    """A maker of folders with one file."""

    def make(folder: Path, lock_fd: int) -> None:
        assert not any(folder.iterdir())
        (folder / "file").write_text(text)

    return make


def make(target: Path, maker: Callable[[Path, int], None]) -> str:
    """What is in the file afterwards."""
    make_once(target, maker, is_made=(target / "file").is_file, on_wait=nobody_waits)
    return (target / "file").read_text()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "new" / "key"
    assert make(target, write("first")) == "first"
    assert make(target, write("second")) == "first"
    assert names(target.parent) == {"key", "key.lock"}


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path, lock_fd: int) -> None:
        (folder / "file").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no$"):
        make(tmp_path / "key", fail)
    assert names(tmp_path) == {"key.lock"}


def leave(root: Path, *partials: str) -> None:
    """As killed makers do."""
    for name in partials:
        (root / name).mkdir()
        (root / name / "half").touch()
        (root / f"{name.split('.')[0]}.lock").touch()


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    leave(tmp_path, "key.4711.partial")
    make(tmp_path / "key", write("whole"))
    assert names(tmp_path) == {"key", "key.lock"}


def test_who_makes_another_removes_it_too(tmp_path: Path) -> None:
    """Nobody makes that one again, once the version or the configuration is another."""
    leave(tmp_path, "old.4711.partial", "older.4712.partial", "older.4713.partial")
    make(tmp_path / "key", write("whole"))
    assert names(tmp_path) == {"key", "key.lock", "old.lock", "older.lock"}


def test_what_is_being_made_or_has_no_lock_stays(tmp_path: Path) -> None:
    def look_around(folder: Path, lock_fd: int) -> None:
        remove_leftovers(tmp_path)
        make(tmp_path / "another", write("other"))
        write("whole")(folder, lock_fd)

    leave(tmp_path, "old.4711.partial", "unlocked.4711.partial")
    (tmp_path / "unlocked.lock").unlink()
    assert make(tmp_path / "key", look_around) == "whole"
    locks = {"key.lock", "another.lock", "old.lock"}
    assert names(tmp_path) == {"key", "another", "unlocked.4711.partial", *locks}


def test_what_is_there_and_not_made_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "rest").touch()
    assert make(tmp_path / "key", write("whole")) == "whole"
    assert names(tmp_path / "key") == {"file"}
    assert names(tmp_path) == {"key", "key.lock"}


def test_many_makers_make_one(tmp_path: Path) -> None:
    target, made = tmp_path / "key", list[Path]()

    def maker(folder: Path, lock_fd: int) -> None:
        made.append(folder)
        write("whole")(folder, lock_fd)

    def take(_: int) -> str:
        make_once(target, maker, is_made=target.is_dir, on_wait=lambda: None)
        return (target / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(take, range(8))) == {"whole"}
    assert len(made) == 1


def test_a_maker_that_is_overtaken_takes_what_the_other_made(tmp_path: Path) -> None:
    """As where somebody emptied the cache, and the lock with it."""
    target = tmp_path / "key"

    def overtaken(folder: Path, lock_fd: int) -> None:
        write("slow")(folder, lock_fd)
        target.mkdir()
        (target / "file").write_text("fast")

    assert make(target, overtaken) == "fast"
    assert names(tmp_path) == {"key", "key.lock"}


def test_a_folder_that_is_written_to_is_replaced_all_the_same(tmp_path: Path) -> None:
    """An engine that does not count as made may be in use: its record of limits is written anew."""
    target, stop = tmp_path / "key", threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            with suppress(OSError):
                (target / "late").touch()

    target.mkdir()
    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for text in map(str, range(100)):
            make_once(
                target,
                write(text),
                is_made=lambda wanted=text: (
                    (target / "file").exists()  # type: ignore[misc]
                    and (target / "file").read_text() == wanted
                ),
                on_wait=nobody_waits,
            )
            assert (target / "file").read_text() == text
    finally:
        stop.set()
        writer.join()


def test_discarding_moves_away_and_tolerates_that_there_is_nothing(tmp_path: Path) -> None:
    make(tmp_path / "key", write("whole"))
    discard(tmp_path / "key")
    assert names(tmp_path) == {"key.lock"}
    discard(tmp_path / "key")


def test_no_home_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(ConfigError, match="^cache_dir: this user has no home folder: set it$"):
        cache_root("")
