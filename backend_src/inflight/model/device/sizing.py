"""What a forward takes of the device's memory at most, measured with one."""

from __future__ import annotations

import numpy as np

from inflight.kernels.kv_layout import KvShape
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.rows import RowBuffer
from inflight.model.device.runtime import DeviceMemory, DeviceRuntime
from inflight.model.device.staging import RowLimits
from inflight.model.runner import PackedInputs


def _no_rows() -> PackedInputs:
    return PackedInputs(
        token_ids=np.zeros(0, dtype=np.int64),
        position_ids=np.zeros(0, dtype=np.int64),
        slot_mapping=np.zeros(0, dtype=np.int64),
        cu_seqlens_q=np.zeros(1, dtype=np.int32),
        context_lens=np.zeros(0, dtype=np.int32),
        block_tables=np.zeros((0, 1), dtype=np.int32),
        logits_indices=np.zeros(0, dtype=np.int64),
        num_context_sequences=0,
        num_context_tokens=0,
    )


NO_ROWS = _no_rows()


def largest_inputs(limits: RowLimits, max_seq_len: int) -> PackedInputs:
    """As many rows as the limits allow, contexts from position 0 on, and as many of them sample as
    may. All sequences lie in the same blocks 0, 1, 2, ..: what they compute means nothing."""
    num_tokens = min(limits.max_num_tokens, limits.max_batch_size * max_seq_len)
    positions = np.arange(num_tokens, dtype=np.int64) % max_seq_len
    starts = np.append(np.arange(0, num_tokens, max_seq_len), num_tokens).astype(np.int32)
    num_sequences = len(starts) - 1
    num_sampling = min(num_tokens, limits.max_batch_size)
    tables = np.arange(limits.max_blocks_per_sequence, dtype=np.int32)
    return PackedInputs(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        position_ids=positions,
        slot_mapping=positions,
        cu_seqlens_q=starts,
        context_lens=np.diff(starts),
        block_tables=np.tile(tables, (num_sequences, 1)),
        logits_indices=np.arange(num_tokens - num_sampling, num_tokens, dtype=np.int64),
        num_context_sequences=num_sequences,
        num_context_tokens=num_tokens,
    )


def measure_kv_memory(
    decoder: DeviceDecoder, shape: KvShape, limits: RowLimits, runtime: DeviceRuntime
) -> int | None:
    """Bytes that the KV cache may take: what is free on the device, once the largest forward has
    what it takes and the scratch block has its own. None: the device has no memory of its own.

    Raises RuntimeError (torch.OutOfMemoryError on a GPU) where not even that forward fits.
    """
    if runtime.memory is None:
        return None
    with runtime.computing():
        taken = _largest_forward(decoder, shape, limits, runtime, runtime.memory)
    runtime.memory.release()
    scratch = limits.tokens_per_block * shape.bytes_per_token
    return max(0, runtime.memory.free() - taken - scratch)


def _largest_forward(
    decoder: DeviceDecoder,
    shape: KvShape,
    limits: RowLimits,
    runtime: DeviceRuntime,
    memory: DeviceMemory,
) -> int:
    """Bytes that it takes beside weights, buffers and KV storage."""
    inputs = largest_inputs(limits, decoder.max_seq_len)
    num_blocks = int(inputs.slot_mapping.max()) // limits.tokens_per_block + 1
    buffer = RowBuffer(limits, runtime)
    storage = shape.allocate(num_blocks, limits.tokens_per_block, runtime.device)

    def forward() -> None:
        decoder.ops.likeliest(decoder.forward(buffer.take(inputs), storage))

    return memory.largest_use(forward)
