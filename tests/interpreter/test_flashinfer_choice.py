"""Whether FlashInfer attends is measured once, and kept beside the launches of our kernels."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from inflight.api.config import InflightConfig  # noqa: E402
from inflight.errors import ConfigError  # noqa: E402
from inflight.kernels import tuning  # noqa: E402
from inflight.kernels.tuning import AttentionShape, Load, launches_for  # noqa: E402
from inflight.model.device import flashinfer_attention as adapter  # noqa: E402
from inflight.model.device import flashinfer_choice as choice  # noqa: E402
from inflight.model.device.flashinfer_attention import BOTH_PHASES, Phases, ScoreKind  # noqa: E402
from inflight.model.device.flashinfer_choice import (  # noqa: E402
    Contest,
    chosen_phases,
    compare,
    entry_name,
    measure_phases,
    measured_phases,
    score_kinds,
)
from inflight.model.device.load import LAUNCHES_FILE, tune_kernels  # noqa: E402
from inflight.model.device.plain_runtime import PlainRuntime  # noqa: E402
from inflight.model.fused.families import decoder_spec  # noqa: E402
from tests.fakes import fake_flashinfer  # noqa: E402
from tests.fakes.tiny_models import SLIDING_WINDOW, tiny_config  # noqa: E402

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
RUNTIME = PlainRuntime(CPU)
SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=64, tokens_per_block=16, dtype=torch.bfloat16
)
KINDS = (ScoreKind(0.125, None, None), ScoreKind(0.125, 20, 2.0))
LOADS = ((Load(sequences=1, rows=4, length=20),), (Load(sequences=2, rows=1, length=20),))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(adapter, "DEVICE_TYPES", ("cuda", "cpu"))
    monkeypatch.setattr(choice, "TRIALS", tuple(load for (load,) in LOADS))


class Clock:
    """Runs once, and says times in the order in which they are asked for."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return next(self._times)


def entry() -> str:
    return entry_name(SHAPE, KINDS, CPU)


def test_the_faster_in_each_phase_is_found_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "kernels.json"
    # Theirs and ours of each kind: contexts in half and in one and a half of our time.
    clock = Clock(1.0, 2.0, 3.0, 2.0, 4.0, 3.0, 1.0, 1.0)
    measure_phases(file, Contest(file, SHAPE, KINDS, RUNTIME), entry(), measure=clock, loads=LOADS)
    kept = json.loads(file.read_text())[entry()]
    assert kept == pytest.approx({"contexts": 0.75**0.5, "generations": (4 / 3) ** 0.5})
    phases = Phases(contexts=True, generations=False)
    assert measured_phases(file, entry()) == phases
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=False) == phases


def test_it_lies_beside_the_launches(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"other": 1}))
    contest = Contest(file, SHAPE, KINDS[:1], RUNTIME)
    measure_phases(file, contest, entry(), measure=Clock(1.0, 2.0, 1.0, 2.0), loads=LOADS)
    assert json.loads(file.read_text())["other"] == 1
    assert launches_for(file, SHAPE, CPU) == launches_for(None, SHAPE, CPU)


@pytest.mark.parametrize(
    "kept", [None, [], {}, {"contexts": 0.5}, {"contexts": 1, "generations": "x"}]
)
def test_what_was_not_measured_chooses_nothing(kept: Any, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({entry(): kept}))
    assert measured_phases(file, entry()) is None
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=False) is None


def test_slower_in_both_phases_it_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({entry(): {"contexts": 1.0, "generations": 2.5}}))
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=False) is None
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=True) == BOTH_PHASES


def test_another_flashinfer_or_other_rules_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {entry(), entry_name(SHAPE, KINDS[:1], CPU)}
    monkeypatch.setattr(fake_flashinfer, "__version__", "9.9")
    assert len(names | {entry()}) == 3


def test_it_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, started = tmp_path / "kernels.json", []
    measured = dict.fromkeys(("contexts", "generations"), 0.5)

    def measure(file: Path, contest: Contest, entry: str) -> None:
        file.write_text(json.dumps({entry: measured}))

    monkeypatch.setattr(choice, "measure_phases", measure)
    for _ in range(2):
        compare(file, SHAPE, KINDS, RUNTIME, lambda: started.append(1))
    assert started == [1]
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=False) == BOTH_PHASES


class Wrong(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    def run(self, q: torch.Tensor, *arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return super().run(q, *arguments, out=out).mul_(2)


class Silent(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    def run(self, q: torch.Tensor, *arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(torch.nan)


class Failing(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    def plan(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("nvcc was not found")


class Older:
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        (Older, "unexpected keyword argument"),
        (Wrong, "differs from our kernels by"),
        (Silent, "by nan"),
        (Failing, "nvcc was not found"),
    ],
)
def test_what_does_not_work_leaves_our_kernels_and_says_so(
    wrapper: type,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fake_flashinfer, "BatchDecodeWithPagedKVCacheWrapper", wrapper)
    file = tmp_path / "kernels.json"
    with caplog.at_level(logging.WARNING):
        compare(file, SHAPE, KINDS, RUNTIME)
    assert reason in caplog.text and "our own kernels attend" in caplog.text
    assert not file.exists()
    with pytest.raises(ConfigError, match=f"attention_backend: flashinfer: .*{reason}"):
        chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=True)


def test_what_fails_while_it_is_measured_leaves_our_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stopped(run: Callable[[], None]) -> float:
        raise RuntimeError("a larger workspace is needed")

    monkeypatch.setattr(choice.triton.testing, "do_bench", stopped)
    with caplog.at_level(logging.WARNING):
        compare(tmp_path / "kernels.json", SHAPE, KINDS, RUNTIME)
    assert "a larger workspace is needed: our own kernels attend" in caplog.text


def test_where_it_is_not_installed_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kernels.json"
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    compare(file, SHAPE, KINDS, RUNTIME, pytest.fail)
    assert chosen_phases(file, SHAPE, KINDS, RUNTIME, is_forced=False) is None


@pytest.mark.parametrize(
    ("backend", "is_compared"),
    [("auto", True), ("triton", False), ("flashinfer", False), ("torch", False)],
)
def test_a_load_compares_only_where_there_is_a_choice(
    backend: str, is_compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CardRuntime(PlainRuntime):
        """Computes nothing here."""

        def __init__(self) -> None:
            super().__init__(torch.device("cuda"))

    seen: list[Any] = []
    monkeypatch.setattr(tuning, "is_measured", lambda *arguments: True)
    monkeypatch.setattr(choice, "compare", lambda *arguments: seen.append(arguments[:3]))
    config = InflightConfig.model_validate(
        {"dtype": "fp16", "attention_backend": backend, "cache_dir": str(tmp_path)}
    )
    spec = decoder_spec(tiny_config("gemma2"))
    tune_kernels(spec, config, CardRuntime(), lambda what, share: None)
    assert len(seen) == is_compared
    for file, shape, kinds in seen:
        assert file == tmp_path / LAUNCHES_FILE and kinds == score_kinds(spec)
        assert (shape.num_heads, shape.dtype) == (spec.num_heads, torch.float16)


def test_layers_of_one_kind_share_a_plan() -> None:
    spec = decoder_spec(tiny_config("gemma2"))
    kinds = score_kinds(spec)
    assert len(spec.layers) > len(kinds) == 2
    assert {kind.sliding_window for kind in kinds} == {None, SLIDING_WINDOW}
    assert {kind.softcap for kind in kinds} == {spec.attention_softcap}
    assert ScoreKind(0.1, 8, None).arguments["window_left"] == 7
