"""CheckedKvStore: KV storage whose content tells whether a block table points where it should."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_PRIME = (1 << 31) - 1
_NEVER_WRITTEN = -1
_GARBAGE = -2


class CheckedKvStore:
    """One int64 a slot. Like real KV it depends on the token and on every token before it.

    The value of position p is ``(value of p - 1) * 48271 + token + 1`` modulo a prime; the salt
    stands before position 0, so equal tokens under another salt are other content.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._slots = np.full(num_blocks * tokens_per_block, _NEVER_WRITTEN, dtype=np.int64)

    def write(
        self,
        table: npt.NDArray[np.int32],
        token_ids: Sequence[int],
        start: int,
        salt: str | None,
    ) -> None:
        """Writes positions [start, len(token_ids))."""
        slots = self._slots_of(table, len(token_ids))
        self._slots[slots[start:]] = self._content(token_ids, salt)[start:]

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32]
    ) -> None:
        """As ``ModelRunner.copy_blocks``; one after the other, so their order would show."""
        blocks = self._slots.reshape(-1, self._tokens_per_block)
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            blocks[target_id] = blocks[source_id]

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        """As ``ModelRunner.read_blocks``."""
        blocks = self._slots.reshape(-1, self._tokens_per_block)
        return [blocks[block_id].copy().view(np.uint8) for block_id in block_ids]

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """As ``ModelRunner.write_blocks``."""
        blocks = self._slots.reshape(-1, self._tokens_per_block)
        blocks[block_ids] = np.stack(contents).view(np.int64)

    def spoil(self, table: npt.NDArray[np.int32], start: int, end: int) -> None:
        """What a forward pass that failed halfway leaves in [start, end)."""
        self._slots[self._slots_of(table, end)[start:]] = _GARBAGE

    def holds(
        self,
        table: npt.NDArray[np.int32],
        token_ids: Sequence[int],
        salt: str | None,
        start: int = 0,
    ) -> bool:
        """Whether the history of these tokens is in the table's blocks, from ``start`` on."""
        read = self._slots[self._slots_of(table, len(token_ids))]
        return read.tolist()[start:] == self._content(token_ids, salt)[start:]

    def _slots_of(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        positions = np.arange(length)
        block_ids = table[positions // self._tokens_per_block].astype(np.int64)
        return block_ids * self._tokens_per_block + positions % self._tokens_per_block

    def _content(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        value = 0 if salt is None else 1 + zlib.crc32(salt.encode())
        content = []
        for token_id in token_ids:
            value = (value * 48271 + token_id + 1) % _PRIME
            content.append(value)
        return content
