"""The drivers of servers, and the words that stand for ids in text prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.drivers import llama_cpp
from tests.benchmarks.compare.drivers.inflight_triton import option_of
from tests.benchmarks.compare.drivers.word_prompts import WordPrompts, is_word
from tests.benchmarks.compare.records import Record, figures_of
from tests.benchmarks.compare.workloads import FIRST_TOKEN, Job, Workload

FAKES = Path(__file__).parents[2] / "fakes"
OPTIONS = LoadOptions(
    checkpoint="nowhere", weights="q8_0", slots=2, slot_tokens=300, reuse=True, threads=2,
    model_file="some.gguf",
)  # fmt: skip
FOUR_JOBS = Workload("W3", tuple(Job(n, (5, 6, 7), 4 + n) for n in range(4)), concurrency=2)


@pytest.fixture
def llama_server(tmp_path: Path) -> Iterator[llama_cpp.System]:
    binary = tmp_path / "llama-server"
    binary.write_text(f"#!{sys.executable}\n" + (FAKES / "fake_llama_server.py").read_text())
    binary.chmod(0o755)
    system = llama_cpp.System(replace(OPTIONS, files=str(tmp_path)))
    yield system
    system.close()


def test_llamacpp_s_events_become_token_times(llama_server: llama_cpp.System) -> None:
    assert llama_server.version == "llama.cpp 7 (fake)"
    assert llama_server.settings["tokens_of_a_slot"] == 512, "300 in steps of 256"
    run = llama_server.serve(FOUR_JOBS, "")
    assert figures_of(FOUR_JOBS, run, 0.0)["exact_lengths"], "held back tokens are counted"
    for record in run.records:
        assert record.token_times == sorted(record.token_times)
        assert 0 < record.token_times[-1] <= run.seconds


def test_what_llamacpp_refuses_is_raised(llama_server: llama_cpp.System) -> None:
    too_long = Workload("W5", (Job(0, (1,) * 2000, 1),), concurrency=1)
    with pytest.raises(RuntimeError, match="400"):
        llama_server.serve(too_long, "")


def test_tokens_without_events_came_with_the_last_one() -> None:
    record = Record(0, token_times=[1.0])
    llama_cpp.complete(record, 3, 2.0)
    assert record.token_times == [1.0, 2.0, 2.0]
    llama_cpp.complete(record, 2, 9.0)
    assert len(record.token_times) == 3, "never fewer than came"


def save_tokenizer(folder: Path) -> Tokenizer:
    """Bytes, and from FIRST_TOKEN on pieces of which three are whole words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: place + 10_000 for place, symbol in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("Ġ", "b"), ("Ġa", "b"), ("a", "b"), ("Ġ", "1")]
    for place, (left, right) in enumerate(merges):
        vocabulary[left + right] = FIRST_TOKEN + place
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_ids_become_words_of_one_token_each(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    words = WordPrompts(tmp_path)
    text = words.text([0, 1, 2, 3, 300])
    assert text == " a b ab a a"
    assert len(tokenizer.encode(text).ids) == 5


def test_equal_prefixes_stay_equal(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    words = WordPrompts(tmp_path)
    prefix = list(range(700, 740))
    assert words.text([*prefix, 1]).startswith(words.text(prefix))
    assert words.text([*prefix, 1]) != words.text([*prefix, 2])


@pytest.mark.parametrize(
    ("text", "expected"), [(" word", True), ("word", False), (" 1st", False), (" é", False)]
)
def test_words_are_a_space_and_letters(text: str, expected: bool) -> None:
    assert is_word(text) is expected


def test_keys_become_options_of_serve() -> None:
    assert option_of("max_batch_size", 16) == ["--max-batch-size", "16"]
    assert option_of("enable_kv_cache_reuse", False) == ["--enable-kv-cache-reuse", "false"]
