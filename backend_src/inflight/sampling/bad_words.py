"""Which ids a request's bad words ban at the next position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BadWords:
    """Bad words as a table: the tokens before the last one -> the last ids that are banned there.

    A single-token word is one whose prefix is empty, so it is banned everywhere. Asking costs one
    look-up for each distinct prefix length, however many words there are.
    """

    def __init__(self, words: Sequence[Sequence[int]], *, max_total_tokens: int) -> None:
        """``max_total_tokens``: longest the sequence can get; longer words can never match."""
        self._banned: dict[int, dict[bytes, list[int]]] = {}
        for word in words:
            if len(word) <= max_total_tokens:
                prefix = np.asarray(word[:-1], dtype=np.int32).tobytes()
                by_prefix = self._banned.setdefault(len(word) - 1, {})
                by_prefix.setdefault(prefix, []).append(word[-1])

    def banned_after(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """Ids that would complete a bad word after ``token_ids`` (int32[n], prompt + generated)."""
        banned: list[int] = []
        for length, by_prefix in self._banned.items():
            if length <= len(token_ids):
                tail = token_ids[len(token_ids) - length :].tobytes()
                banned.extend(by_prefix.get(tail, ()))
        return banned
