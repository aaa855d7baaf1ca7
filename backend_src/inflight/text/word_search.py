"""WordSearch: stop words in a text that grows at its end and is sent off at its front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    start: int
    """Where the word begins in the text."""
    word: str


class WordSearch:
    """Finds the first occurrence of any word, and what of the text may still become one.

    The text itself belongs to the caller. For each word the search remembers the first place where
    it may still begin: places before that are never looked at again, so all calls together look at
    each place of the text once for each word, whatever the words are.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(dict.fromkeys(words))
        self._starts = [0] * len(self._words)

    def __bool__(self) -> bool:
        """False where there is nothing to look for."""
        return bool(self._words)

    def start_at(self, position: int) -> None:
        """Words may begin at ``position`` or later only."""
        self._starts = [max(start, position) for start in self._starts]

    def find(self, text: str) -> Match | None:
        """The word that begins first in ``text``; of two that begin together the longer one."""
        found = [
            Match(at, word)
            for word, start in zip(self._words, self._starts, strict=True)
            if (at := text.find(word, start)) >= 0
        ]
        return min(found, key=lambda match: (match.start, -len(match.word)), default=None)

    def advance(self, text: str) -> Match | None:
        """``find``, where ``text`` is the text of the call before with more at its end."""
        match = self.find(text)
        if match is None:
            for place, word in enumerate(self._words):
                self._starts[place] = _first_start(word, text, self._starts[place])
        return match

    def num_safe(self, text: str) -> int:
        """Characters at the front of ``text`` (the one advanced to) that are part of no word."""
        return min(self._starts, default=len(text))

    def drop(self, num_characters: int) -> None:
        """The caller cut ``num_characters``, all of them safe, from the front of its text."""
        self._starts = [start - num_characters for start in self._starts]


def _first_start(word: str, text: str, start: int) -> int:
    """The first place, at or after ``start``, whose rest of ``text`` is the beginning of ``word``.

    ``len(text)`` where there is none. The text does not hold the whole word at or after ``start``.
    """
    at = max(start, len(text) - len(word) + 1)
    while at < len(text) and not word.startswith(text[at:]):
        at = text.find(word[0], at + 1)
        if at < 0:
            return len(text)
    return at
