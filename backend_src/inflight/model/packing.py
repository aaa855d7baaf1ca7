"""Packer: from a frozen plan to the rows of one forward pass, in buffers that are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.batch import ScheduledBatch, ScheduledChunk
from inflight.model.runner import PackedInputs

Int32Array = npt.NDArray[np.int32]


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
        self._logits_indices = np.zeros(max_batch_size, dtype=np.int64)
        longest = max(max_num_tokens, max_blocks_per_sequence * tokens_per_block)
        self._numbers = np.arange(longest + 1, dtype=np.int64)
        """0, 1, 2, ...: positions and rows are pieces of it."""

    def pack(
        self,
        plan: ScheduledBatch,
        block_table_of: Callable[[int], Int32Array],
        *,
        need_logits: bool = True,
    ) -> PackedInputs:
        """The rows of ``plan`` in its packing order, the last ones those that sample; ``plan``
        computes at least one token.

        ``block_table_of``: request id -> int32[n], the block ids that hold the request's tokens in
        order, those of this iteration included. ``need_logits``: as in PackedInputs.
        """
        assert not plan.is_empty
        num_contexts, num_sequences = len(plan.context), plan.num_chunks
        width = self._copy_block_tables(plan, block_table_of)
        num_context_tokens = 0
        for sequence, chunk in enumerate(plan.context):
            self._fill_context(sequence, num_context_tokens, chunk)
            num_context_tokens += chunk.num_tokens
        num_tokens = num_context_tokens + len(plan.generation)
        if plan.generation:
            self._fill_generation(plan.generation, num_contexts, num_context_tokens)

        num_sampling = len(plan.generation) + sum(chunk.samples for chunk in plan.context)
        ends = self._cu_seqlens_q[1 : num_sequences + 1]
        logits_indices = self._logits_indices[:num_sampling]
        np.subtract(ends[num_sequences - num_sampling :], 1, out=logits_indices)
        return PackedInputs(
            token_ids=self._token_ids[:num_tokens],
            position_ids=self._position_ids[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            cu_seqlens_q=self._cu_seqlens_q[: num_sequences + 1],
            context_lens=self._context_lens[:num_sequences],
            block_tables=self._block_tables[:num_sequences, :width],
            logits_indices=logits_indices,
            num_context_sequences=num_contexts,
            num_context_tokens=num_context_tokens,
            need_logits=need_logits,
        )

    def _copy_block_tables(
        self, plan: ScheduledBatch, block_table_of: Callable[[int], Int32Array]
    ) -> int:
        """Returns the width of the widest table; what lies behind a shorter one is stale."""
        width = 0
        for sequence, chunk in enumerate(plan.chunks):
            table = block_table_of(chunk.request.request_id)
            self._block_tables[sequence, : len(table)] = table
            width = max(width, len(table))
        return width

    def _fill_context(self, sequence: int, row: int, chunk: ScheduledChunk) -> None:
        """The rows of one context chunk, from ``row`` on."""
        rows = slice(row, row + chunk.num_tokens)
        positions = self._numbers[chunk.start : chunk.end]
        self._token_ids[rows] = chunk.request.token_ids[chunk.start : chunk.end]
        self._position_ids[rows] = positions
        self._cu_seqlens_q[sequence + 1] = rows.stop
        self._context_lens[sequence] = chunk.end
        blocks, offsets = np.divmod(positions, self._tokens_per_block)
        slots = self._slot_mapping[rows]
        np.multiply(self._block_tables[sequence, blocks], self._tokens_per_block, out=slots)
        slots += offsets

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
        blocks, offsets = np.divmod(positions, self._tokens_per_block)
        tables = self._block_tables[sequences]
        slots = self._slot_mapping[rows]
        np.multiply(tables[self._numbers[:count], blocks], self._tokens_per_block, out=slots)
        slots += offsets
