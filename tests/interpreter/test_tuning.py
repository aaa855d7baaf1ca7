"""Tuned launches: the fastest is kept in a file, and what is not known there runs with defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from inflight.errors import ConfigError  # noqa: E402
from inflight.kernels import tuning  # noqa: E402
from inflight.kernels.attention import AttentionPlan  # noqa: E402
from inflight.kernels.launch import AttentionLaunches, Launch, default_launches  # noqa: E402
from inflight.kernels.tuning import AttentionShape, Load, launches_for, tune  # noqa: E402

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    num_heads=2, num_kv_heads=1, head_dim=16, tokens_per_block=16, dtype=torch.float32
)
LOADS = ((Load(sequences=1, rows=4, length=20),), (Load(sequences=2, rows=1, length=20),))


class Clock:
    """Runs once, and says a time that depends on the launches alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, time: Callable[..., float]) -> None:
        self.asked: list[AttentionLaunches] = []
        self._time = time
        allocate = AttentionPlan.allocate

        def recorded(**arguments: object) -> AttentionPlan:
            launches = arguments["launches"]
            assert isinstance(launches, AttentionLaunches)
            self.asked.append(launches)
            return allocate(**arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(AttentionPlan, "allocate", recorded)

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return self._time(self.asked[-1])


def test_the_fastest_of_each_phase_is_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best_context, best_generation = tuning.CONTEXT_CANDIDATES[3], tuning.GENERATION_CANDIDATES[2]

    def time(launches: AttentionLaunches) -> float:
        return (
            (launches.context != best_context)
            + (launches.generation != best_generation)
            + launches.programs_per_multiprocessor / 100
        )

    clock = Clock(monkeypatch, time)
    file = tmp_path / "folder" / "launches.json"
    tuned = tune(file, SHAPE, CPU, measure=clock, loads=LOADS)
    assert tuned == AttentionLaunches(
        context=best_context, generation=best_generation, programs_per_multiprocessor=2
    )
    assert launches_for(file, SHAPE, CPU) == tuned
    assert len(clock.asked) == 3 + sum(
        map(len, (tuning.CONTEXT_CANDIDATES, tuning.GENERATION_CANDIDATES, (2, 8)))
    )


def test_the_defaults_stay_where_nothing_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda launches: 1.0)
    tuned = tune(tmp_path / "f", SHAPE, CPU, measure=clock, loads=LOADS)
    assert tuned == default_launches(SHAPE.head_dim, SHAPE.dtype)


@pytest.mark.parametrize(
    "error",
    [OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("PassManager::run failed")],
    ids=["too large", "not compiled"],
)
def test_a_candidate_that_does_not_run_on_the_card_is_passed_over(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", tuning.__name__)

    def time(launches: AttentionLaunches) -> float:
        if launches.context.columns == 128:
            raise error
        return 1.0 / launches.context.columns

    clock = Clock(monkeypatch, time)
    tuned = tune(tmp_path / "f", SHAPE, CPU, measure=clock, loads=LOADS)
    assert tuned.context.columns == 64
    assert "passed over: AttentionLaunches(context=Launch(rows=128" in caplog.messages[0]
    assert caplog.messages[0].endswith(f": {error}")


def test_nothing_runs_and_no_memory_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: Exception) -> Clock:
        def time(launches: AttentionLaunches) -> float:
            raise error

        return Clock(monkeypatch, time)

    with pytest.raises(ConfigError, match="no tile of the kernels runs on this card"):
        tune(tmp_path / "f", SHAPE, CPU, measure=failing(RuntimeError("no")), loads=LOADS)
    with pytest.raises(torch.OutOfMemoryError):
        full = failing(torch.OutOfMemoryError("no memory"))
        tune(tmp_path / "f", SHAPE, CPU, measure=full, loads=LOADS)
    assert not (tmp_path / "f").exists()


def test_shapes_lie_beside_each_other_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "launches.json"
    other = AttentionShape(
        num_heads=2, num_kv_heads=2, head_dim=16, tokens_per_block=32, dtype=torch.float16
    )
    few = Clock(monkeypatch, lambda launches: launches.generation.num_warps)
    first = tune(file, SHAPE, CPU, measure=few, loads=LOADS)
    many = Clock(monkeypatch, lambda launches: 1 / launches.generation.num_warps)
    second = tune(file, other, CPU, measure=many, loads=LOADS)
    assert first.generation.num_warps == 2 and second.generation.num_warps == 8
    assert launches_for(file, SHAPE, CPU) == first
    assert launches_for(file, other, CPU) == second


def test_other_kernels_or_another_triton_make_a_file_worthless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "launches.json"
    clock = Clock(monkeypatch, lambda launches: launches.generation.num_warps)
    tuned = tune(file, SHAPE, CPU, measure=clock, loads=LOADS)
    defaults = default_launches(SHAPE.head_dim, SHAPE.dtype)
    assert tuned != defaults
    monkeypatch.setattr(tuning.triton, "__version__", "0.1")
    assert launches_for(file, SHAPE, CPU) == defaults


DEFAULT_CONTEXT = {"rows": 64, "columns": 64, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {},
        {"context": DEFAULT_CONTEXT, "generation": DEFAULT_CONTEXT},
        {"context": {}, "generation": DEFAULT_CONTEXT, "programs_per_multiprocessor": 4},
        *(
            {
                "context": DEFAULT_CONTEXT | wrong,
                "generation": DEFAULT_CONTEXT,
                "programs_per_multiprocessor": 4,
            }
            for wrong in ({"rows": 48}, {"columns": "64"}, {"num_warps": 0}, {"more": 1})
        ),
        {
            "context": DEFAULT_CONTEXT,
            "generation": DEFAULT_CONTEXT,
            "programs_per_multiprocessor": 10**9,
        },
    ],
)
def test_what_tuning_would_not_write_is_not_read(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "launches.json"
    file.write_text(json.dumps({tuning.key(SHAPE, CPU): entry}))
    assert launches_for(file, SHAPE, CPU) == default_launches(16, torch.float32)


def test_another_card_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = iter(("card A", "card B"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(cards))
    first, second = (tuning.key(SHAPE, torch.device("cuda")) for _ in range(2))
    assert first != second and "card A" in first and "card B" in second
    assert ", cpu: " in tuning.key(SHAPE, torch.device("cpu"))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_broken_file_has_measured_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "launches.json"
    file.write_text(text)
    assert launches_for(file, SHAPE, CPU) == default_launches(16, torch.float32)
    assert launches_for(None, SHAPE, CPU) == launches_for(file, SHAPE, CPU)


@pytest.mark.parametrize("launch", tuning.CONTEXT_CANDIDATES + tuning.GENERATION_CANDIDATES)
def test_candidates_are_tiles_that_kernels_take(launch: Launch) -> None:
    for number in (launch.rows, launch.columns, launch.num_warps):
        assert number & (number - 1) == 0
    assert launch.rows >= 16 and launch.columns >= 16
