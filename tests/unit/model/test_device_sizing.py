"""The largest forward that the limits allow."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.model.device.sizing import largest_inputs
from inflight.model.device.staging import RowLimits


@pytest.mark.parametrize(
    ("max_num_tokens", "max_batch_size", "max_seq_len", "lengths"),
    [
        (512, 8, 128, [128] * 4),
        (300, 8, 128, [128, 128, 44]),
        (512, 2, 128, [128, 128]),
        (16, 64, 128, [16]),
    ],
)
def test_it_has_as_many_rows_as_there_may_be(
    max_num_tokens: int, max_batch_size: int, max_seq_len: int, lengths: list[int]
) -> None:
    limits = RowLimits(
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        max_blocks_per_sequence=max_seq_len // 16,
        tokens_per_block=16,
    )
    inputs = largest_inputs(limits, max_seq_len)
    assert np.diff(inputs.cu_seqlens_q).tolist() == inputs.context_lens.tolist() == lengths
    num_tokens = sum(lengths)
    assert len(inputs.token_ids) == inputs.num_context_tokens == num_tokens
    assert inputs.num_context_sequences == len(lengths) <= max_batch_size
    num_sampling = min(max_batch_size, num_tokens)
    assert inputs.logits_indices.tolist() == list(range(num_tokens - num_sampling, num_tokens))
    starts = np.repeat(inputs.cu_seqlens_q[:-1], lengths)
    np.testing.assert_array_equal(inputs.position_ids, np.arange(num_tokens) - starts)
    np.testing.assert_array_equal(inputs.slot_mapping, inputs.position_ids)
    assert inputs.block_tables.shape == (len(lengths), max_seq_len // 16)
