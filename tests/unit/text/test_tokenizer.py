from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers

from inflight.errors import CheckpointError, InvalidRequestError, UnsupportedRequestError
from inflight.text.tokenizer import Tokenizer
from tests.fakes.tokenizers import BACKENDS, BOS, EOS, byte_level_backend, make_tokenizer


def write_checkpoint(directory: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("family", sorted(BACKENDS))
def test_text_survives_the_round_trip(family: str) -> None:
    tokenizer = make_tokenizer(family)
    assert tokenizer.decode(tokenizer.encode("stop the cab")) == "stop the cab"


def test_other_threads_go_on_while_a_long_text_is_tokenized() -> None:
    tokenizer, begun, ended = make_tokenizer("byte_level"), threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode("the cab stops " * 40_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    num_turns = 0
    while not ended.is_set():
        time.sleep(0)
        num_turns += 1
    thread.join()
    # Where the tokenizer keeps the interpreter to itself it is two or three.
    assert num_turns > 50


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", sorted(BACKENDS))
def test_long_texts_are_tokenized_as_short_ones(
    family: str, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, text = make_tokenizer(family), " the cab stops.\nand 😊"
    as_short = tokenizer.encode(text, add_special_tokens=special)
    monkeypatch.setattr("inflight.text.tokenizer._QUICK_CHARS", 0)
    assert tokenizer.encode(text, add_special_tokens=special) == as_short


def test_ids_that_are_special_or_unknown_have_no_text() -> None:
    tokenizer = make_tokenizer("byte_level")
    (bos,), (think,) = tokenizer.encode(BOS), tokenizer.encode("<think>")
    unknown = tokenizer.vocab_size
    assert [tokenizer.is_visible(i) for i in (bos, unknown, think, 65)] == [
        False,
        False,
        True,
        True,
    ]
    assert tokenizer.decode([bos, 65, unknown, think]) == "A<think>"


def test_bytes_are_tokens_where_the_decoder_says_so() -> None:
    assert {family for family in BACKENDS if make_tokenizer(family).has_byte_fallback} == {
        "llama",
        "gemma",
        "unigram",
    }
    llama = make_tokenizer("llama")
    assert [llama.byte_value(i) for i in llama.encode("é€")[-3:]] == [0xE2, 0x82, 0xAC]
    assert llama.byte_value(llama.encode("a")[-1]) is None


def test_a_token_that_only_looks_like_a_byte_is_text() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<0x41>"])
    assert not Tokenizer(backend).has_byte_fallback


@pytest.mark.parametrize("family", sorted(BACKENDS))
def test_every_sequence_of_a_word_spells_it(family: str) -> None:
    tokenizer = make_tokenizer(family)
    context = tokenizer.encode("cab", add_special_tokens=False)
    sequences = tokenizer.word_sequences("stop")
    assert {tokenizer.decode_after(context, ids) for ids in sequences} <= {"stop", " stop"}
    assert len(set(sequences)) == len(sequences) > 0
    in_a_text = tokenizer.encode("cab stop", add_special_tokens=False)
    assert any(tuple(in_a_text[-len(ids) :]) == ids for ids in sequences)


def test_a_sentencepiece_word_is_found_with_and_without_its_space() -> None:
    tokenizer = make_tokenizer("unigram")
    backend = BACKENDS["unigram"]()
    bare, spaced = backend.token_to_id("stop"), backend.token_to_id("▁stop")
    assert set(tokenizer.word_sequences("stop")) == {(bare,), (spaced,)}


def test_a_word_that_cannot_be_spelled_has_no_sequences() -> None:
    assert make_tokenizer("metaspace").word_sequences("日") == ()
    assert make_tokenizer("byte_level").word_sequences("\ud800") == ()


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"^text_input: .* is not valid Unicode$"):
        make_tokenizer("byte_level").encode("a\ud800")


def test_chat_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"^messages: .*no chat template"):
        make_tokenizer("byte_level").encode_chat('[{"role": "user", "content": "hi"}]')


def test_a_chat_has_one_bos_where_template_and_tokenizer_both_bring_one() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = make_tokenizer("llama", template)
    ids = tokenizer.encode_chat('[{"role": "user", "content": "the cab"}]')
    (bos,) = tokenizer.encode("")
    assert ids.count(bos) == 1
    assert ids[0] == bos


def test_a_checkpoint_neither_truncates_nor_pads(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend))
    assert len(tokenizer.encode("x" * 10)) == 10
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<think>"},
        {"eos_token": {"content": "<think>", "lstrip": False}},
        {"additional_special_tokens": ["<think>"]},
        {"extra_special_tokens": {"thought": "<think>"}},
        {"added_tokens_decoder": {"321": {"content": "<think>", "special": True}}},
    ],
)
def test_tokens_that_the_config_calls_special_are_not_shown(
    tmp_path: Path, config: dict[str, object]
) -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend, **config))
    think = backend.token_to_id("<think>")
    assert tokenizer.encode("<think>") == [think]
    assert tokenizer.decode([65, think]) == "A"
    assert not tokenizer.is_visible(think)


def test_a_special_token_of_no_vocabulary_is_dropped(tmp_path: Path) -> None:
    backend = byte_level_backend()
    directory = write_checkpoint(tmp_path, backend, pad_token="[PAD]")
    assert Tokenizer.from_directory(directory).vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize(
    ("config", "frame"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([BOS], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([BOS], [EOS])),
        ({"add_bos_token": False}, ([], [])),
    ],
)
def test_the_config_decides_about_bos_and_eos(
    tmp_path: Path, config: dict[str, object], frame: tuple[list[str], list[str]]
) -> None:
    backend = byte_level_backend()
    write_checkpoint(tmp_path, backend, bos_token=BOS, eos_token=EOS, **config)
    before, after = ([backend.token_to_id(token) for token in part] for part in frame)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("A") == [*before, 65, *after]
    assert tokenizer.encode("A", add_special_tokens=False) == [65]


@pytest.mark.parametrize("source", ["file", "string", "list"])
def test_the_chat_template_is_found(tmp_path: Path, source: str) -> None:
    template = "{{ eos_token }}{{ messages[0]['content'] }}"
    other = "never"
    config: dict[str, object] = {"eos_token": EOS}
    if source == "file":
        config["chat_template"] = other
        (tmp_path / "chat_template.jinja").write_text(template)
    elif source == "string":
        config["chat_template"] = template
    else:
        config["chat_template"] = [
            {"name": "tool_use", "template": other},
            {"name": "default", "template": template},
        ]
    backend = byte_level_backend()
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend, **config))
    assert tokenizer.encode_chat('[{"role": "user", "content": "A"}]') == [
        backend.token_to_id(EOS),
        65,
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json: not understood"),
        ("tokenizer_config.json", "[", "tokenizer_config.json: not understood"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
        ("chat_template.jinja", "{% for %}", "the chat template is not understood"),
    ],
)
def test_files_that_cannot_be_served_are_named(
    tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    write_checkpoint(tmp_path, byte_level_backend())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer.from_directory(tmp_path)


def test_the_room_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, inflight.text.stream, inflight.text.tokenizer;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
