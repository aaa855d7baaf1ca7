"""The page tables that FlashInfer is given name each token's slot, and nothing undefined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.model.device.flashinfer_rows import paged_sequences

UNDEFINED = -(1 << 30)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    tokens_per_block=st.sampled_from([1, 16, 32]),
    spare=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_every_token_is_found_where_its_block_table_has_it(
    lengths: list[int], tokens_per_block: int, spare: int, seed: int
) -> None:
    counts = [-(-length // tokens_per_block) for length in lengths]
    ids = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
    tables = np.full((len(lengths), max(counts) + spare), UNDEFINED, dtype=np.int32)
    for i, count in enumerate(counts):
        tables[i, :count] = ids[sum(counts[:i]) :][:count]
    paged = paged_sequences(np.array(lengths, dtype=np.int32), tables, tokens_per_block)
    assert {part.dtype for part in (paged.indptr, paged.indices, paged.last_page_len)} == {
        np.dtype(np.int32)
    }
    assert paged.indptr[0] == 0 and paged.indptr[-1] == len(paged.indices)
    for i, length in enumerate(lengths):
        own = paged.indices[paged.indptr[i] : paged.indptr[i + 1]]
        assert (len(own) - 1) * tokens_per_block + paged.last_page_len[i] == length
        assert own.tolist() == tables[i, : counts[i]].tolist()


@pytest.mark.parametrize(("length", "pages", "last"), [(1, 1, 1), (16, 1, 16), (17, 2, 1)])
def test_a_last_page_is_never_empty(length: int, pages: int, last: int) -> None:
    tables = np.array([[5, 2]], dtype=np.int32)
    paged = paged_sequences(np.array([length], dtype=np.int32), tables, 16)
    assert paged.indptr.tolist() == [0, pages] and paged.last_page_len.tolist() == [last]
