"""Packer: from a frozen plan to the rows of one forward pass, in buffers that are made once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from inflight.batch import ScheduledBatch
from inflight.model.runner import PackedInputs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Packer:
    """Owns the step metadata. A pack overwrites the views that the pack before it returned."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_batch_size: int,
        max_blocks_per_sequence: int,
        tokens_per_block: int,
    ) -> None:
        self._tokens_per_block = tokens_per_block
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._position_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_num_tokens, dtype=np.int64)
        self._cu_seqlens_q = np.zeros(max_batch_size + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_batch_size, dtype=np.int32)
        self._block_tables = np.zeros((max_batch_size, max_blocks_per_sequence), dtype=np.int32)
        self._row_numbers = np.arange(max_num_tokens, dtype=np.int64)

    def pack(
        self, plan: ScheduledBatch, block_table_of: Callable[[int], Int32Array]
    ) -> PackedInputs:
        """The rows of ``plan`` in its packing order; ``plan`` computes at least one token.

        ``block_table_of``: request id -> int32[n], the block ids that hold the request's tokens in
        order, those of this iteration included.
        """
        assert not plan.is_empty
        chunks = (*plan.context, *plan.generation)
        num_sequences = len(chunks)
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        cu_seqlens_q = self._cu_seqlens_q[: num_sequences + 1]
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        context_lens = self._context_lens[:num_sequences]
        np.add(starts, lengths, out=context_lens, casting="same_kind")
        num_tokens = int(cu_seqlens_q[-1])

        self._fill_token_ids(plan)
        block_tables = self._fill_block_tables(
            [block_table_of(chunk.request.request_id) for chunk in chunks]
        )
        sequence_of_row = np.repeat(self._row_numbers[:num_sequences], lengths)
        position_ids = self._position_ids[:num_tokens]
        np.add(
            self._row_numbers[:num_tokens],
            (starts - cu_seqlens_q[:-1])[sequence_of_row],
            out=position_ids,
        )
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        return PackedInputs(
            token_ids=self._token_ids[:num_tokens],
            position_ids=position_ids,
            slot_mapping=self._fill_slots(block_tables, sequence_of_row, position_ids),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=block_tables,
            logits_indices=cu_seqlens_q[1:][samples].astype(np.int64) - 1,
            num_context_sequences=len(plan.context),
            num_context_tokens=num_tokens - len(plan.generation),
        )

    def _fill_token_ids(self, plan: ScheduledBatch) -> None:
        row = 0
        for chunk in plan.context:
            self._token_ids[row : row + chunk.num_tokens] = chunk.request.token_ids[
                chunk.start : chunk.end
            ]
            row += chunk.num_tokens
        self._token_ids[row : row + len(plan.generation)] = [
            chunk.request.token_ids[chunk.start] for chunk in plan.generation
        ]

    def _fill_block_tables(self, tables: list[Int32Array]) -> Int32Array:
        """One masked copy for all tables; what lies behind a shorter table is stale."""
        widths = np.array([len(table) for table in tables])
        filled = self._block_tables[: len(tables), : int(widths.max())]
        filled[self._row_numbers[: filled.shape[1]] < widths[:, None]] = np.concatenate(tables)
        return filled

    def _fill_slots(
        self, block_tables: Int32Array, sequence_of_row: Int64Array, position_ids: Int64Array
    ) -> Int64Array:
        block_indices, offsets = np.divmod(position_ids, self._tokens_per_block)
        slots = self._slot_mapping[: len(position_ids)]
        np.multiply(block_tables[sequence_of_row, block_indices], self._tokens_per_block, out=slots)
        slots += offsets
        return slots
