"""TextStream: the generated ids of one request, turned into deltas that can be sent at once.

A delta is cut at an id border, ends in no unfinished character, and holds nothing that may turn out
to be a stop word. It can be decoded by somebody who knows nothing else (``detokenize``), also after
it was merged with the deltas that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight.text.incremental import REPLACEMENT, IncrementalDecoder, Step, context_window
from inflight.text.tokenizer import Tokenizer
from inflight.text.word_search import WordSearch


class TextDelta(NamedTuple):
    """What is new of a stream. Two that follow each other are merged by concatenating ids and text,
    adding the numbers, and keeping the first prefix (of those that have ids)."""

    prefix_token_ids: tuple[int, ...]
    """A few ids from before, behind which ``token_ids`` must be decoded."""
    token_ids: tuple[int, ...]
    text: str
    text_length: int
    """Characters of ``text``."""
    num_generated_tokens: int
    """Of ``token_ids``, without those of an echoed prompt."""


def detokenize(
    tokenizer: Tokenizer,
    prefix_token_ids: Sequence[int],
    token_ids: Sequence[int],
    text_length: int,
) -> str:
    """The text of a delta, from its other fields alone."""
    return tokenizer.decode_after(prefix_token_ids, token_ids)[:text_length]


class _Border(NamedTuple):
    """A place in what is not taken yet where a delta may end."""

    num_ids: int
    num_characters: int


class TextStream:
    """One request's stream: ``append`` for each token, ``take`` at any time, ``finish`` at the end.

    Without a tokenizer the deltas have ids and no text. A stream that is never taken from holds its
    whole output; otherwise it holds what is not safe to send yet, which is at most about as long as
    the longest stop word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        *,
        stop_words: Sequence[str] = (),
        stop_token_sequences: Sequence[Sequence[int]] = (),
        echo_prompt: bool = False,
    ) -> None:
        """``stop_words`` (none of them empty) are searched in generated text only, and
        ``stop_token_sequences`` in generated ids. ``echo_prompt``: the prompt comes first."""
        self._tokenizer = tokenizer
        self._prefix: tuple[int, ...] = ()
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None:
            if not echo_prompt:
                self._prefix = context_window(tokenizer, prompt_token_ids)
            self._decoder = IncrementalDecoder(tokenizer, self._prefix)
        self._ids: list[int] = []
        """Not taken yet, as are the following."""
        self._text = ""
        self._borders = [_Border(0, 0)]
        self._words = WordSearch(stop_words if tokenizer is not None else ())
        self._word_bytes = [word.encode("utf-8", "surrogatepass") for word in stop_words]
        self._id_text = ""
        """The generated ids of ``_ids``, a character each: one search serves text and ids. Kept
        only where there are stop sequences."""
        self._sequences = WordSearch([_as_text(ids) for ids in stop_token_sequences])
        self._num_prompt_ids = 0
        """Ids at the front of ``_ids`` that are the echoed prompt's."""
        self._open_prompt_text = ""
        """What an echoed prompt decodes to alone, where it ends inside a character."""
        self._end: TextDelta | None = None
        if echo_prompt:
            self._num_prompt_ids = len(prompt_token_ids)
            self._extend(prompt_token_ids)
            if self._decoder is not None and self._borders[-1].num_ids < self._num_prompt_ids:
                self._open_prompt_text = self._text + self._decoder.uncertain_text()

    def append(self, token_id: int) -> str | None:
        """Adds a generated token. Returns what matched, if something did: a stop word, or the ids
        of a stop sequence as numbers with a space between. After a match only ``finish`` follows.

        Of several words the one that begins first counts, of two that begin together the longer.
        U+FFFD at the very end is not searched: it may still become another character.
        """
        assert self._end is None, "nothing is appended after a stop word"
        self._extend((token_id,))
        if self._sequences:
            self._id_text += chr(token_id)
        ends = [end for end in (self._match_word(), self._match_sequence()) if end is not None]
        if not ends:
            return None
        self._end, reason = min(ends, key=lambda end: end[0].text_length)
        return reason

    def take(self) -> TextDelta:
        """The largest delta that is safe to send now; it has no ids where there is none."""
        if self._end is not None:
            return self._delta(0, "")
        num_ids = len(self._ids)
        if self._sequences:
            num_ids = self._num_prompt_ids + self._sequences.num_safe(self._id_text)
        num_characters = self._words.num_safe(self._text)
        border = next(
            border
            for border in reversed(self._borders)
            if border.num_ids <= num_ids and border.num_characters <= num_characters
        )
        delta = self._delta(border.num_ids, self._text[: border.num_characters])
        if border.num_ids:
            self._drop(border, delta)
        return delta

    def finish(self) -> TextDelta:
        """All that is left, cut where the stop word or stop sequence begins. Call it once.

        Of a token that the cut goes through the id is in the delta, and its text up to the cut.
        """
        if self._end is not None:
            return self._end
        return self._delta(len(self._ids), self._text_of(self._ids))

    def _extend(self, ids: Sequence[int]) -> None:
        self._ids += ids
        step = Step(len(ids), "", 0) if self._decoder is None else self._decoder.extend(ids)
        self._text += step.text
        if not step.num_settled:
            return
        last = self._borders[-1]
        border = _Border(last.num_ids + step.num_settled, len(self._text) - step.overhang)
        self._borders.append(border)
        if last.num_ids < self._num_prompt_ids <= border.num_ids:
            open_text = self._open_prompt_text
            self._words.start_at(
                _begin_behind(open_text, self._text) if open_text else border.num_characters
            )

    def _match_word(self) -> tuple[TextDelta, str] | None:
        if not self._words or self._borders[-1].num_ids < self._num_prompt_ids:
            return None
        text = self._text
        match = self._words.advance(text)
        if match is None:
            text += self._open_bytes_text()
            match = self._words.find(text)
        if match is None:
            return None
        cut = match.start
        holding = (border.num_ids for border in self._borders if border.num_characters >= cut)
        return self._delta(next(holding, len(self._ids)), text[:cut]), match.word

    def _open_bytes_text(self) -> str:
        """Text of an open run of byte-fallback tokens, if a stop word may end at its end; else "".

        A run may be long and is decoded as a whole, hence the checks before.
        """
        if self._decoder is None or not self._decoder.open_byte_run:
            return ""
        run = self._decoder.open_byte_run
        if not any(word.endswith(run) or run.endswith(word) for word in self._word_bytes):
            return ""
        try:
            run.decode()
        except UnicodeDecodeError:  # all of it is U+FFFD, so far or for good
            return ""
        return self._decoder.uncertain_text().rstrip(REPLACEMENT)

    def _match_sequence(self) -> tuple[TextDelta, str] | None:
        match = self._sequences.advance(self._id_text) if self._sequences else None
        if match is None:
            return None
        num_ids = self._num_prompt_ids + match.start
        delta = self._delta(num_ids, self._text_of(self._ids[:num_ids]))
        return delta, " ".join(str(ord(character)) for character in match.word)

    def _text_of(self, ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode_after(self._prefix, ids)

    def _delta(self, num_ids: int, text: str) -> TextDelta:
        return TextDelta(
            prefix_token_ids=self._prefix,
            token_ids=tuple(self._ids[:num_ids]),
            text=text,
            text_length=len(text),
            num_generated_tokens=max(0, num_ids - self._num_prompt_ids),
        )

    def _drop(self, border: _Border, delta: TextDelta) -> None:
        """Forgets what ``delta``, up to ``border``, has taken."""
        del self._ids[: border.num_ids]
        self._text = self._text[border.num_characters :]
        self._borders = [
            _Border(num_ids - border.num_ids, num_characters - border.num_characters)
            for num_ids, num_characters in self._borders
            if num_ids >= border.num_ids
        ]
        self._num_prompt_ids = max(0, self._num_prompt_ids - border.num_ids)
        self._words.drop(border.num_characters)
        self._id_text = self._id_text[delta.num_generated_tokens :]
        self._sequences.drop(delta.num_generated_tokens)
        if self._tokenizer is not None:
            self._prefix = context_window(self._tokenizer, self._prefix + delta.token_ids)


def _begin_behind(open_text: str, text: str) -> int:
    """Where generated text begins in ``text``, whose prompt alone decodes to ``open_text``.

    Behind the character that generated ids completed for the prompt, or behind its broken bytes.
    """
    for at, (alone, together) in enumerate(zip(open_text, text, strict=False)):
        if alone != together:
            return at + 1
    return len(open_text)


def _as_text(ids: Sequence[int]) -> str:
    """A character for each id: ids are rows of a vocabulary, and there are more characters."""
    return "".join(map(chr, ids))
