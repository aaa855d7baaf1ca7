"""Worker processes: kept while they fit, warmed up once, reported in one line when they fail."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.compare import fleet as fleet_module
from tests.benchmarks.compare.fleet import Fleet, WorkerError
from tests.benchmarks.compare.systems import System
from tests.benchmarks.compare.workloads import make_workload

DRIVER = "tests.fakes.fake_bench_system"
W1, W4 = make_workload("W1", 0), make_workload("W4", 0)
OK = System("fake", DRIVER, "ok")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fleet(tmp_path: Path, said: list[str]) -> Iterator[Fleet]:
    with Fleet("nowhere", 2, tmp_path, turn_seconds=30, say=said.append) as made:
        yield made


def test_a_workload_is_warmed_up_before_its_first_turn_alone(fleet: Fleet) -> None:
    assert [fleet.take_turn(OK, W1, salt).run.seconds for salt in (0, 1)] == [2.0, 3.0]


def test_each_door_is_warmed_up(fleet: Fleet) -> None:
    fleet.take_turn(OK, W1, 0)
    other_door = System("fake-2", DRIVER, "ok", door="ensemble")
    turn = fleet.take_turn(other_door, W1, 0)
    assert turn.run.seconds == 4.0, "a warm-up of its own, in the same process"


def test_a_process_stays_while_the_workload_needs_nothing_else(
    fleet: Fleet, said: list[str]
) -> None:
    first = fleet.take_turn(OK, W1, 0).settings["pid"]
    assert fleet.take_turn(OK, make_workload("W2c8", 0), 0).settings["pid"] == first
    with_prefix_cache = fleet.take_turn(OK, W4, 0).settings["pid"]
    assert with_prefix_cache != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert said == ["loading fake_bench_system"] * 2


def test_output_of_libraries_goes_to_the_log(fleet: Fleet, tmp_path: Path) -> None:
    turn = fleet.take_turn(OK, W1, 0)
    assert len(turn.run.records[0].token_times) == 128
    assert "a library that prints" in (tmp_path / "fake_bench_system.log").read_text()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("no-load", "fake: RuntimeError: no such weights;"),
        ("no-serve", "fake: ValueError: cannot serve;"),
        ("dies", "fake: ended without an answer;"),
    ],
)
def test_a_failure_is_one_line_and_the_next_turn_starts_afresh(
    fleet: Fleet, weights: str, message: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        fleet.take_turn(System("fake", DRIVER, weights), W1, 0)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert fleet.take_turn(OK, W1, 0).run.seconds == 2.0


def test_a_system_that_says_nothing_is_ended(tmp_path: Path) -> None:
    with (
        Fleet("nowhere", 2, tmp_path, turn_seconds=2, say=lambda line: None) as fleet,
        pytest.raises(WorkerError, match="ended without an answer"),
    ):
        fleet.take_turn(System("fake", DRIVER, "silent"), W1, 0)


def test_an_interruption_ends_a_worker_in_the_middle_of_its_work(tmp_path: Path) -> None:
    pid = 0
    began = time.monotonic()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Fleet("nowhere", 2, tmp_path, turn_seconds=30, say=lambda line: None) as fleet,
    ):
        pid = fleet.take_turn(OK, W1, 0).settings["pid"]
        silent = System("fake", DRIVER, "silent")
        main = threading.main_thread().ident
        threading.Timer(2.0, signal.pthread_kill, [main, signal.SIGINT]).start()
        fleet.take_turn(silent, W1, 0)
    assert time.monotonic() - began < 20, "it would have been silent for a minute"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_short_memory_ends_the_one_that_rested_longest(
    fleet: Fleet, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.take_turn(OK, W1, 0)
    monkeypatch.setattr(fleet_module, "available_bytes", lambda: 0)
    with pytest.raises(WorkerError):  # there is no such module; room was made before
        fleet.take_turn(System("other", "tests.fakes.no_such_driver", "ok"), W1, 0)
    assert "memory is short: ending fake_bench_system" in said


def test_a_turn_tells_the_cpu_that_others_used(fleet: Fleet) -> None:
    turn = fleet.take_turn(OK, W1, 0)
    assert turn.rested_cpu_s == 0.0, "nothing else is loaded"
    assert turn.foreign_cpu_s >= 0.0
