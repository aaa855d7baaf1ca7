"""What makes an engine another engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inflight.engine_files import key
from inflight.engine_files.key import EngineKey, engine_key
from inflight.errors import CheckpointError
from tests.unit.engine_files.contents import make_key


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def key_of(folder: Path, cache: Path, dtype: str = "bf16") -> EngineKey:
    return engine_key(folder, dtype, str(cache))


def test_the_content_counts_and_not_the_place(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one")
    first = key_of(one, tmp_path)
    (one / "tokenizer.json").write_text('{"other": 1}')
    assert key_of(one, tmp_path) == first
    assert key_of(one.rename(tmp_path / "two"), tmp_path) == first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-2.safetensors"])
def test_other_weights_or_another_configuration(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model")
    first = key_of(folder, tmp_path)
    (folder / name).write_bytes(b"something else")
    changed = key_of(folder, tmp_path)
    assert changed.checkpoint != first.checkpoint and changed.name != first.name
    assert not changed.is_another_version_of(first)


def test_dtype_cpu_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model")
    found = {key_of(folder, tmp_path, dtype).name for dtype in ("fp32", "bf16", "int8", "int4")}
    first = key_of(folder, tmp_path)
    monkeypatch.setattr(key, "cpu_kind", lambda: "another cpu")
    found.add(key_of(folder, tmp_path).name)
    monkeypatch.undo()
    monkeypatch.setattr(key, "_code_hash", lambda: "other code")
    other = key_of(folder, tmp_path)
    found.add(other.name)
    assert len(found) == 6
    assert other.is_another_version_of(first) and not first.is_another_version_of(first)


def test_auto_is_no_dtype_of_an_engine(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        key_of(make_checkpoint(tmp_path / "model"), tmp_path, "auto")


def test_the_code_is_hashed_with_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in key._WHAT_DECIDES_THE_BYTES:
        assert list(key._PACKAGE.glob(pattern)), f"{pattern} names nothing"
    (tmp_path / "native").mkdir()
    source = tmp_path / "native" / "packed.py"
    source.write_text("layout = 1")
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    before = key._code_hash.__wrapped__()
    source.write_text("layout = 2")
    assert key._code_hash.__wrapped__() != before


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="model.safetensors: No such file"):
        key_of(folder, tmp_path)


def test_looking_for_an_engine_loads_no_torch() -> None:
    program = (
        "import sys, inflight.engine_files.store, inflight.engine_files.limits\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_names_are_those_of_all_parts() -> None:
    names = {make_key(**{part: "x"}).name for part in ("checkpoint", "dtype", "cpu", "code")}
    assert len(names | {make_key().name}) == 5
