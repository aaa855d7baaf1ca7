"""How FlashInfer wants to be told of sequences in a paged KV cache: arithmetic on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Sequences(Protocol):
    """What ``PackedInputs`` says of the sequences of an iteration: contexts first, then generations
    of one row each."""

    @property
    def cu_seqlens_q(self) -> Int32Array: ...
    @property
    def context_lens(self) -> Int32Array: ...
    @property
    def block_tables(self) -> Int32Array: ...
    @property
    def num_context_sequences(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedSequences:
    """FlashInfer's page table of S sequences: the ids of their blocks one after the other, without
    gaps. Sequence s has indices[indptr[s] : indptr[s + 1]]; all its blocks are full but the last,
    which holds ``last_page_len[s]`` tokens, from 1 to all of a block."""

    indptr: Int32Array
    """int32[S + 1], from 0."""
    indices: Int32Array
    """int32[N]."""
    last_page_len: Int32Array
    """int32[S]."""


def paged_sequences(
    context_lens: Int32Array, block_tables: Int32Array, tokens_per_block: int
) -> PagedSequences:
    """Of int32[S] tokens of each sequence, at least one, and int32[S, B] block tables. What is
    undefined in a table is not read."""
    counts = -(-context_lens // tokens_per_block)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    tables = block_tables[:, : counts.max()]
    is_used = np.arange(tables.shape[1]) < counts[:, None]
    return PagedSequences(
        indptr=indptr,
        indices=tables[is_used],
        last_page_len=context_lens - (counts - 1) * tokens_per_block,
    )
