"""Checkpoint and kernels are made side by side; neither's absence stops the other. The engine
follows, where there is one to build."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from inflight.api.config import InflightConfig
from inflight.checkpoint import Checkpoint
from inflight.cli import preparation
from inflight.cli.doctor import accelerator
from inflight.cli.errors import StartupError
from inflight.engine_files.key import engine_key
from inflight.engine_files.store import EngineStore
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
    monkeypatch.setattr(preparation, "computes_on_card", lambda device: False)
    monkeypatch.setattr(preparation, "needs_engine", lambda *_: False)


def test_both_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2, timeout=5)
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir, stop: meeting.wait())

    def convert(model_dir: str, cache_dir: str, *, progress: object) -> Checkpoint:
        meeting.wait()
        return MADE

    monkeypatch.setattr(preparation, "prepare_checkpoint", convert)
    assert preparation.prepare(InflightConfig(), lambda line: None) is MADE


def test_the_start_waits_for_the_kernels_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_QUICK_SECONDS", 0.01)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    go_on = threading.Event()
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir, stop: go_on.wait(5))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        go_on.set()

    preparation.prepare(InflightConfig(), say)
    assert said == ["compiling the native kernels (once)"]


def test_the_build_begins_while_the_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports for seconds before it needs them."""
    monkeypatch.setattr(preparation, "_QUICK_SECONDS", 0.01)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    monkeypatch.setattr(preparation, "needs_engine", lambda *_: True)
    building = threading.Event()
    compiled: list[bool] = []
    monkeypatch.setattr(
        preparation, "build_native", lambda cache_dir, stop: compiled.append(building.wait(5))
    )
    monkeypatch.setattr(preparation, "run_build", lambda config: building.set())
    said: list[str] = []
    preparation.prepare(InflightConfig(), said.append)
    assert compiled == [True], "and the start waits for both"
    assert said == ["compiling the native kernels (once)", "building the engine of made (once)"]


def test_without_a_compiler_the_checkpoint_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(cache_dir: str, stop: threading.Event) -> Path:
        raise NativeUnavailableError("no compiler")

    monkeypatch.setattr(preparation, "build_native", build)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    assert preparation.prepare(InflightConfig(), lambda line: None) is MADE


def test_nothing_is_built_without_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_little(directory: Path, dtype: str, available_bytes: int) -> None:
        assert (directory, dtype) == (MADE.directory, "bf16") and available_bytes > 0
        raise StartupError("not enough memory")

    monkeypatch.setattr(preparation, "build_native", lambda cache_dir, stop: None)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    monkeypatch.setattr(preparation, "needs_engine", lambda *_: True)
    monkeypatch.setattr(preparation, "check_memory", too_little)
    built: list[InflightConfig] = []
    monkeypatch.setattr(preparation, "run_build", built.append)
    with pytest.raises(StartupError, match="not enough memory"):
        preparation.prepare(InflightConfig(dtype="bf16"), lambda line: None)
    assert not built


@pytest.mark.parametrize("sees_card", [True, False])
def test_what_torch_sees_decides_for_whom_is_prepared(
    sees_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver alone is not a card that computes."""
    monkeypatch.setattr(accelerator, "has_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "_ask_torch", lambda: ("13.0", sees_card))
    monkeypatch.setattr(preparation, "computes_on_card", accelerator.computes_on_card)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    done: list[str] = []
    monkeypatch.setattr(preparation, "build_native", lambda cache_dir, stop: done.append("kernels"))
    monkeypatch.setattr(preparation, "check_memory", lambda *_: done.append("memory"))
    preparation.prepare(InflightConfig(), lambda line: None)
    assert sorted(done) == ([] if sees_card else ["kernels", "memory"])
    preparation.prepare(InflightConfig(device="cpu"), lambda line: None)
    assert sorted(done[-2:]) == ["kernels", "memory"]


def test_a_bad_checkpoint_does_not_wait_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(
        preparation, "build_native", lambda cache_dir, stop: stopped.append(stop.wait(30))
    )

    def refuse(*_: object, **__: object) -> Checkpoint:
        raise CheckpointError("model_dir: nothing there")

    monkeypatch.setattr(preparation, "prepare_checkpoint", refuse)
    with pytest.raises(CheckpointError):
        preparation.prepare(InflightConfig(), lambda line: None)
    assert stopped == [True]


@pytest.mark.parametrize(("kernels", "wanted"), [(True, True), (True, False), (False, True)])
def test_the_engine_is_built_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, wanted: bool
) -> None:
    def compile_them(cache_dir: str, stop: threading.Event) -> None:
        if not kernels:
            raise NativeUnavailableError("no compiler")

    built: list[InflightConfig] = []
    monkeypatch.setattr(preparation, "build_native", compile_them)
    monkeypatch.setattr(preparation, "prepare_checkpoint", lambda *a, **k: MADE)
    monkeypatch.setattr(preparation, "needs_engine", lambda *_: wanted)
    monkeypatch.setattr(preparation, "run_build", built.append)
    config = InflightConfig()
    preparation.prepare(config, lambda line: None)
    assert built == ([config] if kernels and wanted else [])


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether a server would have to build; the checkpoint is in tmp_path / "model"."""
    monkeypatch.undo()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    checkpoint = Checkpoint(
        directory=folder,
        model_type="llama",
        end_ids=(),
        max_position_embeddings=64,
        vocab_size=10,
        name="model",
    )

    def needs(**values: Any) -> bool:
        config = InflightConfig.model_validate({"cache_dir": str(tmp_path)} | values)
        return preparation.needs_engine(checkpoint, config)

    return needs


def test_what_needs_no_engine(ask: Any, tmp_path: Path) -> None:
    assert ask() and ask(dtype="int4") and ask(runner="fused")
    assert not ask(runner="hf") and not ask(dtype="fp16") and not ask(attention_backend="torch")
    assert ask(tokens_per_block=128) and not ask(tokens_per_block=24) and not ask(dtype="fp8")
    assert not ask(kv_cache_dtype="fp16")
    # With kernels, which alone have an engine, auto is bf16 on every CPU.
    key = engine_key(tmp_path / "model", "bf16", str(tmp_path))
    EngineStore(str(tmp_path)).note_reason_against(key, "no such architecture")
    assert not ask() and not ask(dtype="bf16") and ask(dtype="fp32") and ask(dtype="int4")


def test_weights_of_another_form_need_no_engine(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert not ask()


def test_asking_loads_no_torch() -> None:
    program = "import sys, inflight.cli.preparation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """``run_build`` runs this program instead of the command."""
    monkeypatch.setattr(preparation, "_BUILD", [sys.executable, "-c", program])


def test_the_build_runs_with_the_same_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert preparation._BUILD[1:] == ["-m", "inflight.cli", "build"]
    note = tmp_path / "environment"
    run_instead(
        monkeypatch,
        "import json, os, sys; print('a warning', file=sys.stderr);"
        f"json.dump(dict(os.environ), open({str(note)!r}, 'w'))",
    )
    preparation.run_build(
        InflightConfig(dtype="int4", max_batch_size=3, enable_chunked_context=False)
    )
    config = InflightConfig.load(environment=json.loads(note.read_text()))
    assert (config.dtype, config.max_batch_size) == ("int4", 3)
    assert not config.enable_chunked_context
    assert "a warning" in capsys.readouterr().err


def test_a_build_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "import sys; sys.exit('noise\\ninflight: dtype: int4: no')")
    with pytest.raises(StartupError, match="^the engine cannot be built: dtype: int4: no$"):
        preparation.run_build(InflightConfig())
    run_instead(
        monkeypatch,
        "import os, sys; print('a warning', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
    )
    with pytest.raises(StartupError, match="built: it was killed by signal 9 .too little memory"):
        preparation.run_build(InflightConfig())
    run_instead(monkeypatch, "import os; os._exit(9)")
    with pytest.raises(StartupError, match="^the engine cannot be built: exit code 9$"):
        preparation.run_build(InflightConfig())
