"""What is read of a checkpoint folder, and where from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint import Checkpoint, prepare_checkpoint
from inflight.errors import CheckpointError
from tests.unit.checkpoint.folders import CONFIG, make_folder, write_json


def prepare(folder: Path) -> Checkpoint:
    lines: list[str] = []
    checkpoint = prepare_checkpoint(str(folder), str(folder / "cache"), progress=lines.append)
    assert lines == [] and not (folder / "cache").exists()
    return checkpoint


def test_a_plain_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    assert prepare(folder) == Checkpoint(
        directory=folder,
        model_type="llama",
        end_ids=(2,),
        max_position_embeddings=128,
        vocab_size=300,
        name="tiny",
    )


def test_gpt2_names_and_nested_text_config(tmp_path: Path) -> None:
    older = {"model_type": "gpt2", "vocab_size": 9, "n_positions": 64}
    nested = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"vocab_size": 9, "max_position_embeddings": 64},
    }
    for name, config, end_ids in (("older", older, ()), ("nested", nested, (1, 106))):
        checkpoint = prepare(make_folder(tmp_path / name, config__json=config))
        assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (9, 64)
        assert checkpoint.end_ids == end_ids


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        ([7, 8, 7], 2, "</s>", (7, 8)),
        (0, 2, "</s>", (0,)),
        (None, [2, 3], "</s>", (2, 3)),
        (None, None, "</s>", (5,)),
        (None, None, {"content": "</s>", "lstrip": False}, (5,)),
        (None, None, "<unknown>", ()),
        (None, None, None, ()),
    ],
)
def test_end_ids_come_from_the_first_file_that_names_them(
    tmp_path: Path, generation: Any, config: Any, token: Any, expected: tuple[int, ...]
) -> None:
    folder = make_folder(
        tmp_path / "tiny",
        generation_config__json={"eos_token_id": generation},
        config__json={**CONFIG, "eos_token_id": config},
        tokenizer_config__json={"eos_token": token},
        tokenizer__json={"added_tokens": [{"id": 5, "content": "</s>"}]},
    )
    assert prepare(folder).end_ids == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"vocab_size": 0}, "vocab_size: 0 must be 1 or larger"),
        ({"vocab_size": "many"}, "vocab_size: 'many' must be"),
        ({"max_position_embeddings": True}, "max_position_embeddings: True must be"),
        ({"eos_token_id": -1}, "eos_token_id: -1 must be an id"),
        ({"eos_token_id": ["</s>"]}, "must be an id or a list of ids"),
    ],
)
def test_values_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = make_folder(tmp_path / "tiny", config__json={**CONFIG, **changes})
    with pytest.raises(CheckpointError, match=reason):
        prepare(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json: (not valid JSON|must hold)"):
        prepare(folder)


def test_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make_folder(tmp_path / "tiny"), target_is_directory=True)
    assert prepare(tmp_path / "link").directory == tmp_path / "link"


def test_files_may_be_missing_but_not_unreadable(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    write_json(folder / "generation_config.json", ["not", "an", "object"])
    with pytest.raises(CheckpointError, match="generation_config.json: must hold a JSON object"):
        prepare(folder)


def test_no_torch_comes_in() -> None:
    import subprocess

    code = "import sys, inflight.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
