"""RowGroup: rows of one iteration that are attended together, padded to one shape.

A group has S sequences of M rows each and looks at L keys of every sequence. A generation is one
row, so many sequences share a group; a context is a group of one sequence, cut into several when
it is long. Only this view of the rows is padded, and only by what similar lengths differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.model.runner import PackedInputs

MAX_KEYS = 1 << 14
"""Most keys (S * L) of a group of several sequences: bounds the gathered copies."""
MAX_SCORES = 1 << 18
"""Most scores per head (M * L) of a context's group, as far as whole rows allow."""
EVEN_LENGTH = 512
"""Shorter contexts count as this long when generations of similar length are put together: an
extra group costs more than the padding it saves."""

Int64Array = npt.NDArray[np.int64]


class RowGroup:
    """Index tensors of a group, made once an iteration and used by every layer."""

    __slots__ = (
        "rows",
        "num_sequences",
        "num_rows",
        "num_keys",
        "_block_ids",
        "_first_positions",
        "_last_positions",
        "_positions",
        "_hidden",
        "_block_rows",
        "_unseen",
    )

    def __init__(
        self,
        rows: Int64Array,
        block_tables: npt.NDArray[np.int32],
        positions: Int64Array,
        tokens_per_block: int,
        device: torch.device,
    ) -> None:
        """``rows``: int64[S * M], rows of the iteration, sequence by sequence.

        ``block_tables``: int32[S, B], undefined past the blocks a sequence needs. ``positions``:
        int64[S, M], ascending in each sequence.
        """
        last = positions[:, -1]
        width = int(last.max()) // tokens_per_block + 1
        needed = np.arange(width) * tokens_per_block <= last[:, None]
        self.num_sequences, self.num_rows = positions.shape
        self.num_keys = width * tokens_per_block
        self.rows = torch.from_numpy(rows).to(device)
        self._first_positions, self._last_positions = positions[:, :1], positions[:, -1:]
        block_ids = np.where(needed, block_tables[:, :width], 0).astype(np.int64)
        self._block_ids = torch.from_numpy(block_ids.ravel()).to(device)
        self._positions = torch.from_numpy(positions).to(device)
        self._hidden: dict[int | None, Tensor] = {}
        self._unseen: dict[int | None, Tensor] = {}
        self._block_rows: dict[tuple[int, int], Tensor] = {}

    def hidden(self, sliding_window: int | None) -> Tensor:
        """bool[S, M, L]: True where the row does not see the key."""
        if sliding_window not in self._hidden:
            keys = torch.arange(self.num_keys, device=self._positions.device)
            positions = self._positions[:, :, None]
            hidden = keys > positions
            if sliding_window is not None:
                hidden |= keys <= positions - sliding_window
            self._hidden[sliding_window] = hidden
        return self._hidden[sliding_window]

    def unseen_keys(self, sliding_window: int | None) -> Tensor:
        """int64, indices in [0, S * L) of keys that no row of their sequence sees: those past its
        last row, and those before the window of its first."""
        if sliding_window not in self._unseen:
            keys = np.arange(self.num_keys)
            unseen = keys > self._last_positions
            if sliding_window is not None:
                unseen |= keys <= self._first_positions - sliding_window
            indices = torch.from_numpy(np.flatnonzero(unseen))
            self._unseen[sliding_window] = indices.to(self._positions.device)
        return self._unseen[sliding_window]

    def block_rows(self, num_heads: int, num_blocks: int) -> Tensor:
        """int64[num_heads * S * B]: rows of the blocks in storage [num_heads * num_blocks, ...]."""
        shape = (num_heads, num_blocks)
        if shape not in self._block_rows:
            first = torch.arange(num_heads, device=self._block_ids.device) * num_blocks
            self._block_rows[shape] = (first[:, None] + self._block_ids).ravel()
        return self._block_rows[shape]


def group_rows(inputs: PackedInputs, tokens_per_block: int, device: torch.device) -> list[RowGroup]:
    """All rows of the iteration, each in exactly one group."""
    return [
        RowGroup(
            rows,
            inputs.block_tables[sequences],
            inputs.position_ids[rows].reshape(len(sequences), -1),
            tokens_per_block,
            device,
        )
        for sequences, rows in (*_context_tiles(inputs), *_generation_sets(inputs))
    ]


def _context_tiles(inputs: PackedInputs) -> Iterator[tuple[Int64Array, Int64Array]]:
    for sequence in range(inputs.num_context_sequences):
        first, end = (int(row) for row in inputs.cu_seqlens_q[sequence : sequence + 2])
        tile = max(1, MAX_SCORES // int(inputs.context_lens[sequence]))
        for start in range(first, end, tile):
            yield np.array([sequence]), np.arange(start, min(start + tile, end))


def _generation_sets(inputs: PackedInputs) -> Iterator[tuple[Int64Array, Int64Array]]:
    first = inputs.num_context_sequences
    lengths = np.maximum(inputs.context_lens[first:], EVEN_LENGTH)
    doublings = np.ceil(np.log2(lengths / EVEN_LENGTH)).astype(int)
    for doubling in np.unique(doublings):
        sequences = first + np.flatnonzero(doublings == doubling)
        most = max(1, MAX_KEYS // (EVEN_LENGTH << int(doubling)))
        for start in range(0, len(sequences), most):
            some = sequences[start : start + most]
            yield some, inputs.cu_seqlens_q[some].astype(np.int64)
