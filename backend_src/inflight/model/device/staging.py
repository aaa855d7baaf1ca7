"""StagedRows: the metadata of an iteration in one buffer, so that one copy brings it to the device.

All metadata is int32. The block tables come last, but for how the rows are sampled: what is copied
ends with the last number that is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.batch.device_sampling import SamplingRoom
from inflight.model.device.staged_sampling import (
    ALIGNMENT,
    Section,
    end_of,
    sampling_size,
    stage_sampling,
)
from inflight.model.runner import PackedInputs

Int32Array = npt.NDArray[np.int32]

_LISTED_PER_SEQUENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    max_num_tokens: int
    max_batch_size: int
    """Sequences of an iteration."""
    max_blocks_per_sequence: int
    tokens_per_block: int

    @property
    def sampling_room(self) -> SamplingRoom:
        """The ids of a longest sequence fit, which are counted when it starts, those that an
        iteration computes, and some for each sequence."""
        longest = self.max_blocks_per_sequence * self.tokens_per_block
        listed = longest + self.max_num_tokens + _LISTED_PER_SEQUENCE * self.max_batch_size
        return SamplingRoom(num_slots=self.max_batch_size, num_listed=listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where each section begins in the buffer, in numbers."""

    token_ids: int
    position_ids: int
    slot_mapping: int
    logits_indices: int
    cu_seqlens_q: int
    context_lens: int
    block_tables: int
    size: int
    """With room for how the rows are sampled, which has no place of its own."""
    table_stride: int
    """Numbers from one block table to the next."""

    @classmethod
    def of(cls, limits: RowLimits) -> RowLayout:
        tokens, sequences = limits.max_num_tokens, limits.max_batch_size
        starts, end = [], 0
        for size in (tokens, tokens, tokens, tokens, sequences + 1, sequences):
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        names = ("token_ids", "position_ids", "slot_mapping", "logits_indices", "cu_seqlens_q",
                 "context_lens")  # fmt: skip
        return cls(
            **dict(zip(names, starts, strict=True)),
            block_tables=end,
            size=end
            + sequences * limits.max_blocks_per_sequence
            + sampling_size(limits.sampling_room),
            table_stride=limits.max_blocks_per_sequence,
        )

    def used(self, num_sequences: int) -> int:
        """Numbers from the beginning that hold everything of so many sequences."""
        return self.block_tables + num_sequences * self.table_stride


class StagedRows:
    """The buffer on the host. A fill overwrites the one before."""

    def __init__(self, limits: RowLimits, buffer: Int32Array) -> None:
        """``buffer``: int32[RowLayout.size]."""
        layout = RowLayout.of(limits)
        assert buffer.shape == (layout.size,)
        self.layout = layout
        self.buffer = buffer
        self.sampling: dict[str, Section] = {}
        """Where the last fill has put how its rows are sampled; empty: it had nothing of that."""
        buffer[:] = 0
        tables = buffer[layout.block_tables : layout.used(limits.max_batch_size)]
        self._tables = tables.reshape(limits.max_batch_size, layout.table_stride)
        self._tokens_per_block = limits.tokens_per_block
        self._numbers = np.arange(limits.max_batch_size + 1, dtype=np.int32)

    def fill(self, inputs: PackedInputs) -> int:
        """Takes the rows as they are. Returns how many numbers of the buffer are used."""
        return self._with_sampling(self._fill(inputs), inputs)

    def _fill(self, inputs: PackedInputs) -> int:
        layout, num_tokens = self.layout, len(inputs.token_ids)
        num_sequences, width = inputs.block_tables.shape
        self._put(layout.token_ids, inputs.token_ids)
        self._put(layout.position_ids, inputs.position_ids)
        self._put(layout.slot_mapping, inputs.slot_mapping)
        self._put(layout.logits_indices, inputs.logits_indices)
        self._put(layout.cu_seqlens_q, inputs.cu_seqlens_q)
        self._put(layout.context_lens, inputs.context_lens)
        self._tables[:num_sequences, :width] = inputs.block_tables
        assert inputs.cu_seqlens_q[-1] == num_tokens
        return layout.used(num_sequences)

    def fill_generations(self, inputs: PackedInputs, num_rows: int, scratch_block: int) -> int:
        """As ``fill``, of generations that all sample, with further rows up to ``num_rows``.

        Each of those is a sequence of one token in the first slot of ``scratch_block``, which no
        table names: they read and write nothing else, and all of them the same.
        """
        assert inputs.num_context_sequences == 0
        used, layout = self._fill(inputs), self.layout
        rows = slice(len(inputs.token_ids), num_rows)
        for start, value in (
            (layout.token_ids, 0),
            (layout.position_ids, 0),
            (layout.slot_mapping, scratch_block * self._tokens_per_block),
            (layout.context_lens, 1),
        ):
            self.buffer[start + rows.start : start + rows.stop] = value
        self._put(layout.cu_seqlens_q, self._numbers[: num_rows + 1])
        self._put(layout.logits_indices, self._numbers[:num_rows])
        self._tables[rows, 0] = scratch_block
        return self._with_sampling(max(used, layout.used(num_rows)), inputs)

    def _with_sampling(self, used: int, inputs: PackedInputs) -> int:
        self.sampling = {}
        if inputs.sampling is None:
            return used
        self.sampling = stage_sampling(self.buffer, used, inputs.sampling)
        return end_of(self.sampling)

    def _put(self, start: int, values: npt.NDArray[np.integer[Any]]) -> None:
        self.buffer[start : start + len(values)] = values
