"""IncrementalDecoder: the text of a growing id sequence, as soon as no later id can change it.

Decoding is not append-only. The last bytes may be the beginning of a character (shown as U+FFFD
until the rest comes). A run of byte-fallback tokens is decoded as a whole, so that one bad byte
spoils characters before it. And the first token of a text may lose its space. So a piece of text is
given out only at an id border where it is *settled*: decode(ids up to there) is a prefix of
decode(ids up to there + whatever follows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What bytes that are no UTF-8, or not yet, decode to."""

CONTEXT_TOKENS = 4
"""Visible ids of a window. One is enough for the space of a first token; an unfinished character
takes up to three."""

_MAX_CONTEXT_TOKENS = 16
"""The window may grow to this before it is cut to CONTEXT_TOKENS, which costs another decode."""


class Step(NamedTuple):
    """What became known by an id."""

    num_settled: int
    """Ids, the oldest of those not settled before, that are settled now."""
    text: str
    """Characters that became certain: no later id changes them."""
    overhang: int
    """Of all characters certain so far, how many lie behind the last of these ids."""


def context_window(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """The last visible ids, CONTEXT_TOKENS at most, that new ids can be decoded behind.

    Byte-fallback tokens at the very end are left out: bytes that follow would join their run.
    """
    window: list[int] = []
    for token_id in reversed(ids):
        if not tokenizer.is_visible(token_id):
            continue
        if not window and tokenizer.byte_value(token_id) is not None:
            continue
        window.append(token_id)
        if len(window) == CONTEXT_TOKENS:
            break
    return tuple(reversed(window))


class IncrementalDecoder:
    """Takes ids, tells which text they make certain and where it is settled.

    An id costs one decode of at most _MAX_CONTEXT_TOKENS ids and those not settled yet; of the
    latter there are a few, except inside a run of byte-fallback tokens, which is decoded once.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """``context``: a ``context_window`` of the ids before the first one; its text is not
        given out."""
        self._tokenizer = tokenizer
        self._window = list(context)
        """Visible ids: some settled ones, then all that are not settled."""
        self._num_open_visible = 0
        self._num_open = 0
        """Ids not settled, invisible ones included."""
        self._text = tokenizer.decode(self._window)
        """decode(window), but for an open run of bytes."""
        self._num_certain = len(self._text)
        """Characters of ``_text`` that are given out, or are the context's."""
        self._byte_run = bytearray()

    @property
    def open_byte_run(self) -> bytearray:
        """The bytes of the run that the last visible ids are; empty where they are none. The text
        of an open run is not certain."""
        return self._byte_run

    def uncertain_text(self) -> str:
        """What the ids so far decode to beyond the certain text; U+FFFD for unfinished bytes."""
        return self._tokenizer.decode(self._window)[self._num_certain :]

    def extend(self, ids: Sequence[int]) -> Step:
        """Adds ids. They are settled together or not at all: one id, or a whole echoed prompt."""
        visible = [token_id for token_id in ids if self._tokenizer.is_visible(token_id)]
        self._num_open += len(ids)
        if not visible:
            return self._extend_without_text()
        self._window += visible
        self._num_open_visible += len(visible)
        self._follow_byte_run(visible)
        if self._byte_run:
            return Step(0, "", 0)
        before, self._text = self._text, self._tokenizer.decode(self._window)
        if self._tokenizer.has_byte_fallback or not self._text.endswith(REPLACEMENT):
            return self._settle(self._num_open, 0, len(self._text))
        if len(self._text) > len(before) and self._text.startswith(before):
            # What looked unfinished before these ids was broken: a character begins behind it.
            return self._settle(self._num_open - len(ids), len(visible), len(before))
        return self._settle(0, self._num_open_visible, self._num_certain)

    def _extend_without_text(self) -> Step:
        """Invisible ids are settled where they stand, unless visible ones before them are not."""
        if self._num_open_visible:
            return Step(0, "", 0)
        num_settled, self._num_open = self._num_open, 0
        return Step(num_settled, "", 0)

    def _follow_byte_run(self, visible: Sequence[int]) -> None:
        for token_id in visible:
            byte = self._tokenizer.byte_value(token_id)
            if byte is None:
                self._byte_run.clear()
            else:
                self._byte_run.append(byte)

    def _settle(self, num_settled: int, num_open_visible: int, border: int) -> Step:
        """``border``: characters of ``_text`` up to the last settled id."""
        finished = len(self._text.rstrip(REPLACEMENT))
        certain = max(self._num_certain, border, finished)
        step = Step(num_settled, self._text[self._num_certain : certain], certain - border)
        self._num_certain = certain
        self._num_open -= num_settled
        self._num_open_visible = num_open_visible
        self._shorten_window()
        return step

    def _shorten_window(self) -> None:
        num_context = len(self._window) - self._num_open_visible
        if num_context <= _MAX_CONTEXT_TOKENS:
            return
        del self._window[: num_context - CONTEXT_TOKENS]
        text = self._tokenizer.decode(self._window)
        self._num_certain += len(text) - len(self._text)
        self._text = text
