"""Checkpoint and kernels are made side by side; neither's absence stops the other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from inflight.api.config import InflightConfig
from inflight.checkpoint import Checkpoint
from inflight.cli import preparation
from inflight.errors import CheckpointError
from inflight.native.build import NativeUnavailableError

MADE = Checkpoint(
    directory=Path("made"),
    model_type="llama",
    end_ids=(0,),
    max_position_embeddings=64,
    vocab_size=10,
    name="made",
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation.preflight, "has_gpu", lambda: False)


def test_both_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2, timeout=5)
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir: meeting.wait())

    def convert(model_dir: str, cache_dir: str, *, progress: object) -> Checkpoint:
        meeting.wait()
        return MADE

    monkeypatch.setattr(preparation, "prepare_checkpoint", convert)
    assert preparation.prepare(InflightConfig(), lambda line: None) is MADE


def test_the_start_waits_for_the_kernels_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_QUICK_SECONDS", 0.01)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    go_on = threading.Event()
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir: go_on.wait(5))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        go_on.set()

    preparation.prepare(InflightConfig(), say)
    assert said == ["compiling the native kernels (once)"]


def test_without_a_compiler_the_checkpoint_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(cache_dir: str) -> Path:
        raise NativeUnavailableError("no compiler")

    monkeypatch.setattr(preparation, "build_native", build)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    assert preparation.prepare(InflightConfig(), lambda line: None) is MADE


def test_a_bad_checkpoint_does_not_wait_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir: go_on.wait(5))

    def refuse(*_: object, **__: object) -> Checkpoint:
        raise CheckpointError("model_dir: nothing there")

    monkeypatch.setattr(preparation, "prepare_checkpoint", refuse)
    with pytest.raises(CheckpointError):
        preparation.prepare(InflightConfig(), lambda line: None)
    assert not go_on.is_set()
    go_on.set()
