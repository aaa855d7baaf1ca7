from __future__ import annotations

import pytest

from inflight.text.word_search import Match, WordSearch


def test_finds_a_word_that_comes_in_parts() -> None:
    search = WordSearch(["stop"])
    assert search.advance("a st") is None
    assert search.num_safe("a st") == 2
    assert search.advance("a sto") is None
    assert search.advance("a stop!") == Match(2, "stop")


@pytest.mark.parametrize(
    ("text", "num_safe"),
    [("", 0), ("xyz", 3), ("xa", 1), ("xaab", 1), ("aabaac", 6), ("aabaabaab", 3)],
)
def test_what_may_become_a_word_is_not_safe(text: str, num_safe: int) -> None:
    search = WordSearch(["aabaabX", "abX"])
    assert search.advance(text) is None
    assert search.num_safe(text) == num_safe


def test_a_broken_beginning_becomes_safe_and_a_later_one_is_still_found() -> None:
    search = WordSearch(["aab"])
    text = ""
    for letter, num_safe in [("a", 0), ("a", 0), ("a", 1), ("c", 4), ("a", 4), ("a", 4)]:
        text += letter
        assert search.advance(text) is None
        assert search.num_safe(text) == num_safe
    assert search.advance(text + "b") == Match(4, "aab")


def test_the_word_that_begins_first_counts_then_the_longer_one() -> None:
    words = ["bc", "abcd", "ab", "d"]
    assert WordSearch(words).advance("xabcd") == Match(1, "abcd")
    assert WordSearch(words).advance("xabc") == Match(1, "ab")


def test_positions_follow_when_the_front_is_sent_off() -> None:
    search = WordSearch(["end"])
    assert search.advance("some text e") is None
    search.drop(10)
    assert search.num_safe("e") == 0
    assert search.advance("end") == Match(0, "end")


def test_words_begin_where_the_search_starts_at_the_earliest() -> None:
    search = WordSearch(["ab"])
    search.start_at(1)
    assert search.advance("ab") is None
    assert search.advance("abab") == Match(2, "ab")


def test_nothing_to_look_for() -> None:
    search = WordSearch([])
    assert not search
    assert search.advance("text") is None
    assert search.num_safe("text") == 4
