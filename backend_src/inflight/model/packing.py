"""Packer: from a frozen plan to the rows of one forward pass, in buffers that are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.batch import ScheduledBatch, ScheduledChunk
from inflight.batch.device_sampling import SamplingInputs
from inflight.model.runner import PackedInputs, PoolRows

Int32Array = npt.NDArray[np.int32]
BlockTableOf = Callable[[int], Int32Array]
"""Request id -> int32[n], the block ids of one pool that hold the request's tokens in order, those
of this iteration included."""


class _PoolBuffers:
    """Block tables and slots of one pool."""

    def __init__(
        self,
        max_num_tokens: int,
        max_batch_size: int,
        max_blocks_per_sequence: int,
        tokens_per_block: int,
    ) -> None:
        self._tokens_per_block = tokens_per_block
        self.slot_mapping = np.zeros(max_num_tokens, dtype=np.int64)
        self.block_tables = np.zeros((max_batch_size, max_blocks_per_sequence), dtype=np.int32)

    def copy_tables(self, plan: ScheduledBatch, block_table_of: BlockTableOf) -> int:
        """Returns the width of the widest table; what lies behind a shorter one is stale."""
        width = 0
        for sequence, chunk in enumerate(plan.chunks):
            table = block_table_of(chunk.request.request_id)
            self.block_tables[sequence, : len(table)] = table
            width = max(width, len(table))
        return width

    def rows(self, num_tokens: int, num_sequences: int, width: int) -> PoolRows:
        """What was filled, with tables of ``width``."""
        return PoolRows(
            slot_mapping=self.slot_mapping[:num_tokens],
            block_tables=self.block_tables[:num_sequences, :width],
        )

    def fill_context(self, rows: slice, sequence: int, positions: npt.NDArray[np.int64]) -> None:
        """The slots of rows of one sequence at these positions."""
        blocks, offsets = np.divmod(positions, self._tokens_per_block)
        slots = self.slot_mapping[rows]
        np.multiply(self.block_tables[sequence, blocks], self._tokens_per_block, out=slots)
        slots += offsets

    def fill_generation(
        self,
        rows: slice,
        sequences: slice,
        numbers: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """The slots of one row of each sequence; ``numbers``: 0, 1, .. for each."""
        blocks, offsets = np.divmod(positions, self._tokens_per_block)
        tables = self.block_tables[sequences]
        slots = self.slot_mapping[rows]
        np.multiply(tables[numbers, blocks], self._tokens_per_block, out=slots)
        slots += offsets


class Packer:
    """Owns the step metadata. A pack overwrites the views that the pack before it returned."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_batch_size: int,
        max_blocks_per_sequence: int,
        tokens_per_block: int,
        num_pools: int = 1,
    ) -> None:
        self._pools = tuple(
            _PoolBuffers(max_num_tokens, max_batch_size, max_blocks_per_sequence, tokens_per_block)
            for _ in range(num_pools)
        )
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._position_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._cu_seqlens_q = np.zeros(max_batch_size + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_batch_size, dtype=np.int32)
        self._logits_indices = np.zeros(max_batch_size, dtype=np.int64)
        longest = max(max_num_tokens, max_blocks_per_sequence * tokens_per_block)
        self._numbers = np.arange(longest + 1, dtype=np.int64)
        """0, 1, 2, ...: positions and rows are pieces of it."""

    def pack(
        self,
        plan: ScheduledBatch,
        block_table_of: BlockTableOf,
        further_tables_of: Sequence[BlockTableOf] = (),
        *,
        need_logits: bool = True,
        sampling: SamplingInputs | None = None,
    ) -> PackedInputs:
        """The rows of ``plan`` in its packing order, the last ones those that sample; ``plan``
        computes at least one token.

        ``further_tables_of``: of the second pool and those after it. ``need_logits``,
        ``sampling``: as in PackedInputs.
        """
        assert not plan.is_empty
        num_contexts, num_sequences = len(plan.context), plan.num_chunks
        tables_of = (block_table_of, *further_tables_of)
        widths = [
            pool.copy_tables(plan, table_of)
            for pool, table_of in zip(self._pools, tables_of, strict=True)
        ]
        num_context_tokens = self._fill_contexts(plan.context)
        num_tokens = num_context_tokens + len(plan.generation)
        if plan.generation:
            self._fill_generation(plan.generation, num_contexts, num_context_tokens)
        first, *further = [
            pool.rows(num_tokens, num_sequences, width)
            for pool, width in zip(self._pools, widths, strict=True)
        ]
        return PackedInputs(
            token_ids=self._token_ids[:num_tokens],
            position_ids=self._position_ids[:num_tokens],
            slot_mapping=first.slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q[: num_sequences + 1],
            context_lens=self._context_lens[:num_sequences],
            block_tables=first.block_tables,
            logits_indices=self._sampling_rows(plan, num_sequences),
            num_context_sequences=num_contexts,
            num_context_tokens=num_context_tokens,
            need_logits=need_logits,
            sampling=sampling,
            further_pools=tuple(further),
        )

    def _sampling_rows(self, plan: ScheduledBatch, num_sequences: int) -> npt.NDArray[np.int64]:
        """Of each sequence that samples, its last row; those sequences are the last ones."""
        count = len(plan.generation)
        for chunk in plan.context:
            count += chunk.samples
        rows = self._logits_indices[:count]
        np.subtract(self._cu_seqlens_q[num_sequences + 1 - count : num_sequences + 1], 1, out=rows)
        return rows

    def _fill_contexts(self, contexts: Sequence[ScheduledChunk]) -> int:
        """Returns the number of their rows."""
        num_rows = 0
        for sequence, chunk in enumerate(contexts):
            self._fill_context(sequence, num_rows, chunk)
            num_rows += chunk.num_tokens
        return num_rows

    def _fill_context(self, sequence: int, row: int, chunk: ScheduledChunk) -> None:
        """The rows of one context chunk, from ``row`` on."""
        rows = slice(row, row + chunk.num_tokens)
        positions = self._numbers[chunk.start : chunk.end]
        self._token_ids[rows] = chunk.request.token_ids[chunk.start : chunk.end]
        self._position_ids[rows] = positions
        self._cu_seqlens_q[sequence + 1] = rows.stop
        self._context_lens[sequence] = chunk.end
        for pool in self._pools:
            pool.fill_context(rows, sequence, positions)

    def _fill_generation(
        self, generation: Sequence[ScheduledChunk], first_sequence: int, first_row: int
    ) -> None:
        """All generations at once: a row each, behind the contexts."""
        count = len(generation)
        rows = slice(first_row, first_row + count)
        sequences = slice(first_sequence, first_sequence + count)
        self._token_ids[rows] = [chunk.request.token_at(chunk.start) for chunk in generation]
        positions = self._position_ids[rows]
        positions[:] = [chunk.start for chunk in generation]
        self._cu_seqlens_q[first_sequence + 1 : sequences.stop + 1] = self._numbers[
            first_row + 1 : rows.stop + 1
        ]
        self._context_lens[sequences] = positions + 1
        for pool in self._pools:
            pool.fill_generation(rows, sequences, self._numbers[:count], positions)
