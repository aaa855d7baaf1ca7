from __future__ import annotations

from pathlib import Path

from inflight.cli.shared_memory import SharedMemoryPrefix, remove_leftovers


def test_nothing_under_the_prefix_is_left(tmp_path: Path) -> None:
    (tmp_path / "another_region").touch()
    with SharedMemoryPrefix(tmp_path) as memory:
        (tmp_path / f"{memory.prefix}1").touch()
        assert memory.clear() == 1
        (tmp_path / f"{memory.prefix}2").touch()
    assert [file.name for file in tmp_path.iterdir()] == ["another_region"]


def test_two_supervisors_have_two_prefixes(tmp_path: Path) -> None:
    with SharedMemoryPrefix(tmp_path) as one, SharedMemoryPrefix(tmp_path) as two:
        (tmp_path / f"{two.prefix}region").touch()
        assert one.clear() == 0
        assert (tmp_path / f"{two.prefix}region").exists()


def test_leftovers_are_those_whose_owner_died(tmp_path: Path) -> None:
    dead = "inflight_0badcafe_"
    for name in ("lock", "region"):
        (tmp_path / (dead + name)).touch()
    with SharedMemoryPrefix(tmp_path) as living:
        region = tmp_path / f"{living.prefix}region"
        region.touch()
        assert remove_leftovers(tmp_path) == 1
        assert region.exists()
        assert not list(tmp_path.glob(dead + "*"))
    assert list(tmp_path.iterdir()) == []
