from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from inflight.text.stream import TextDelta, TextStream, detokenize
from inflight.text.tokenizer import Tokenizer
from tests.fakes.tokenizers import BOS, byte_ids, make_tokenizer


@cache
def byte_level() -> Tokenizer:
    return make_tokenizer("byte_level")


@cache
def llama() -> Tokenizer:
    return make_tokenizer("llama")


def spell(data: bytes) -> list[int]:
    return byte_ids(byte_level(), data)


def texts_of(stream: TextStream, ids: list[int]) -> list[str]:
    """The text of each delta when it is taken after every token; the last is the final one."""
    texts = []
    for token_id in ids:
        assert stream.append(token_id) is None
        texts.append(stream.take().text)
    return [*texts, stream.finish().text]


def test_each_token_goes_out_at_once() -> None:
    ids = byte_level().encode("the stop ab")
    stream = TextStream(byte_level(), [])
    assert texts_of(stream, ids) == ["the", " stop", " ab", ""]


def test_a_delta_carries_what_a_stateless_detokenizer_needs() -> None:
    prompt, first, second = (byte_level().encode(text) for text in ("the", " stop", " ab"))
    stream = TextStream(byte_level(), prompt)
    deltas = []
    for token_id in (*first, *second):
        stream.append(token_id)
        deltas.append(stream.take())
    assert deltas == [
        TextDelta(tuple(prompt), tuple(first), " stop", 5, 1),
        TextDelta((*prompt, *first), tuple(second), " ab", 3, 1),
    ]
    assert detokenize(byte_level(), *deltas[1][:2], text_length=3) == " ab"
    assert detokenize(byte_level(), *deltas[1][:2], text_length=2) == " a"


def test_the_prefix_stays_short_and_holds_no_special_tokens() -> None:
    bos = byte_level().encode(BOS)[0]
    stream = TextStream(byte_level(), [bos, *spell(b"abcdef"), bos, bos])
    assert stream.finish().prefix_token_ids == tuple(spell(b"cdef"))


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    stream = TextStream(byte_level(), [])
    assert texts_of(stream, spell("a🙂".encode())) == ["a", "", "", "", "🙂", ""]


def test_a_character_that_began_in_the_prompt_belongs_to_the_prompt() -> None:
    unfinished, rest = spell("the 🙂".encode())[:-1], spell("🙂 a".encode())[3:]
    stream = TextStream(byte_level(), unfinished)
    assert texts_of(stream, rest) == ["", " ", "a", ""]


def test_broken_bytes_go_out_when_a_character_begins_behind_them() -> None:
    stream = TextStream(byte_level(), [])
    ids = spell(b"\xf0\x9f\xf0\x9fa\xff")
    assert texts_of(stream, ids) == ["", "", "\ufffd", "", "\ufffda", "", "\ufffd"]


def test_broken_bytes_without_end_do_not_pile_up() -> None:
    stream = TextStream(byte_level(), [])
    held = 0
    for _ in range(200):
        stream.append(0xF0)
        held += 1 - len(stream.take().token_ids)
    assert held == 1


def test_the_space_of_the_first_word_depends_on_the_prompt() -> None:
    ids = llama().encode("the ab", add_special_tokens=False)
    bos = llama().encode("")
    prompt = llama().encode("ab")
    assert "".join(texts_of(TextStream(llama(), bos), ids)) == "the ab"
    assert "".join(texts_of(TextStream(llama(), prompt), ids)) == " the ab"


def test_a_prompt_that_ends_in_byte_tokens_still_gives_the_first_word_its_space() -> None:
    prompt, ids = llama().encode("🙂"), llama().encode("the", add_special_tokens=False)
    assert llama().byte_value(prompt[-1]) == 0x82
    assert "".join(texts_of(TextStream(llama(), prompt), ids)) == " the"


def test_a_run_of_byte_tokens_waits_until_it_ends() -> None:
    smile = llama().encode("a🙂", add_special_tokens=False)[-4:]
    (letter,) = llama().encode("\na", add_special_tokens=False)[-1:]
    prompt = llama().encode("ab")
    good = texts_of(TextStream(llama(), prompt), [*smile, letter])
    assert good == ["", "", "", "", "🙂a", ""]
    broken = texts_of(TextStream(llama(), prompt), [*smile, smile[0], letter])
    assert broken == ["", "", "", "", "", "\ufffd" * 5 + "a", ""]


def test_a_stop_word_is_seen_inside_an_open_run_of_byte_tokens() -> None:
    run = llama().encode("a日本語", add_special_tokens=False)[-9:]
    stream = TextStream(llama(), llama().encode("ab"), stop_words=["本"])
    assert [stream.append(token_id) for token_id in run[:6]] == [None] * 5 + ["本"]
    assert stream.finish().text == "日"


def test_a_stop_word_never_leaks_across_token_borders() -> None:
    ids = byte_level().encode("ab stop the")
    stream = TextStream(byte_level(), [], stop_words=["b stop t"])
    sent = ""
    for token_id in ids[:2]:
        assert stream.append(token_id) is None
        sent += stream.take().text
    assert sent == ""  # "ab" is one token: the word may begin inside it
    assert stream.append(ids[2]) == "b stop t"
    assert stream.take() == TextDelta((), (), "", 0, 0)
    assert stream.finish() == TextDelta((), tuple(ids[:1]), "a", 1, 1)


def test_ids_behind_the_cut_are_not_in_the_answer() -> None:
    ids = byte_level().encode("the stop")
    stream = TextStream(byte_level(), [], stop_words=[" stop"])
    assert [stream.append(token_id) for token_id in ids] == [None, " stop"]
    assert stream.finish() == TextDelta((), tuple(ids[:1]), "the", 3, 1)


def test_what_only_looked_like_a_stop_word_goes_out() -> None:
    ids = byte_level().encode("ab stop ab")
    stream = TextStream(byte_level(), [], stop_words=["b stop t"])
    assert texts_of(stream, ids) == ["", "", "ab stop", " ab"]  # the last b may begin another


def test_the_cut_goes_through_a_token_that_also_begins_a_character() -> None:
    straddling = next(
        i for i in range(byte_level().vocab_size) if byte_level().decode([i]) == "p\ufffd"
    )
    stream = TextStream(byte_level(), [], stop_words=["p"])
    assert stream.append(straddling) == "p"
    assert stream.finish().text == ""


def test_a_stop_word_may_begin_in_text_that_was_sent_with_the_prompt_only_if_generated() -> None:
    prompt, ids = byte_level().encode("sto"), byte_level().encode("p stop")
    for echo in (False, True):
        stream = TextStream(byte_level(), prompt, stop_words=["stop"], echo_prompt=echo)
        assert [stream.append(token_id) for token_id in ids] == [None, "stop"]
        assert stream.finish().text == ("stop " if echo else "p ")


def test_an_echoed_prompt_is_not_counted() -> None:
    prompt, ids = byte_level().encode("the stop"), byte_level().encode(" ab")
    stream = TextStream(byte_level(), prompt, echo_prompt=True)
    assert stream.take() == TextDelta((), tuple(prompt), "the stop", 8, 0)
    stream.append(ids[0])
    assert stream.take() == TextDelta(tuple(prompt), tuple(ids), " ab", 3, 1)


def test_an_echoed_prompt_waits_for_the_character_it_ends_in() -> None:
    stream = TextStream(byte_level(), spell(b"a\xe2\x82"), echo_prompt=True, stop_words=["€"])
    assert stream.take().token_ids == ()
    assert stream.append(0xAC) is None  # the character began in the prompt
    assert stream.take() == TextDelta((), tuple(spell("a€".encode())), "a€", 2, 1)


@pytest.mark.parametrize("spell_in", [byte_level, llama])
def test_stop_words_are_found_behind_an_echoed_prompt_that_ends_in_broken_bytes(
    spell_in: Callable[[], Tokenizer],
) -> None:
    tokenizer = spell_in()
    prompt = [*tokenizer.encode("a"), *byte_ids(tokenizer, b"\xe2\x82")]
    stream = TextStream(tokenizer, prompt, echo_prompt=True, stop_words=["he"])
    (token_id,) = [i for i in tokenizer.encode("a\nhe") if tokenizer.decode([i]) == "he"]
    assert stream.append(token_id) == "he"
    assert stream.finish().text == tokenizer.decode(prompt)


def test_stop_sequences_are_held_back_and_cut() -> None:
    stream = TextStream(byte_level(), [1, 2], stop_token_sequences=[[65, 66], [300]])
    assert stream.append(65) is None
    assert stream.take().token_ids == ()
    assert stream.append(67) is None
    assert stream.take().text == "AC"
    assert stream.append(65) is None
    assert stream.append(66) == "65 66"
    assert stream.finish().token_ids == ()


@pytest.mark.parametrize(
    ("stop_words", "sequence", "reason", "text"),
    [(["bc"], [99], "bc", "a"), (["c"], [98, 99], "98 99", "a"), (["c"], [99], "c", "ab")],
)
def test_of_a_word_and_a_sequence_the_one_that_cuts_more_counts(
    stop_words: list[str], sequence: list[int], reason: str, text: str
) -> None:
    stream = TextStream(byte_level(), [], stop_words=stop_words, stop_token_sequences=[sequence])
    assert [stream.append(token_id) for token_id in b"abc"] == [None, None, reason]
    assert stream.finish().text == text


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    stream = TextStream(
        None, [7, 8], stop_words=["x"], stop_token_sequences=[[2, 3]], echo_prompt=True
    )
    assert stream.take() == TextDelta((), (7, 8), "", 0, 0)
    assert [stream.append(token_id) for token_id in (1, 2)] == [None, None]
    assert stream.take() == TextDelta((), (1,), "", 0, 1)
    assert stream.append(3) == "2 3"
    assert stream.finish() == TextDelta((), (), "", 0, 0)


def test_special_and_unknown_ids_have_no_text_and_hold_nothing_up() -> None:
    bos = byte_level().encode(BOS)[0]
    ids = [bos, *byte_level().encode("ab"), bos, byte_level().vocab_size + 5]
    stream = TextStream(byte_level(), [])
    taken = []
    for token_id in ids:
        stream.append(token_id)
        taken.append(stream.take())
    assert [delta.token_ids for delta in taken] == [(token_id,) for token_id in ids]
    assert [delta.text for delta in taken] == ["", "ab", "", ""]
