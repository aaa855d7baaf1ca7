"""Token ids as text that a server tokenizes into just as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tests.benchmarks.compare.workloads import FIRST_TOKEN, LAST_TOKEN


class WordPrompts:
    """Maps each id to a token that is a space and a word of letters; equal ids to equal words.

    Tokenizers split text before such words, so each is tokenized by itself.
    """

    def __init__(self, checkpoint: Path) -> None:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        candidates = (tokenizer.decode([i]) for i in range(FIRST_TOKEN, LAST_TOKEN + 1))
        self._words = [
            word
            for word in candidates
            if is_word(word) and len(tokenizer.encode(word, add_special_tokens=False).ids) == 1
        ]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self._words[i % len(self._words)] for i in ids)


def is_word(text: str) -> bool:
    return text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()
