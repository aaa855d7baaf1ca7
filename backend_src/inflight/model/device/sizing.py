"""What a forward takes of the device's memory at most, measured with one; the rows of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from inflight.api.config import InflightConfig
from inflight.batch.device_sampling import RowLists, SamplingInputs
from inflight.errors import CheckpointError
from inflight.kernels.kv_layout import KvShape
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.rows import RowBuffer
from inflight.model.device.runtime import DeviceMemory, DeviceRuntime
from inflight.model.device.sampler import DeviceSampler
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


def limits_of(config: InflightConfig, max_seq_len: int) -> RowLimits:
    return RowLimits(
        max_num_tokens=config.max_num_tokens,
        max_batch_size=config.max_batch_size,
        max_blocks_per_sequence=-(-max_seq_len // config.tokens_per_block),
        tokens_per_block=config.tokens_per_block,
    )


def does_not_fit(config: InflightConfig, device: torch.device) -> CheckpointError:
    """When memory runs out while the model is loaded and measured."""
    return CheckpointError(
        f"model_dir: the weights, and a forward of max_num_tokens {config.max_num_tokens}, do "
        f"not fit into the memory of {device}"
    )


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


def every_rule(num_rows: int, vocab_size: int) -> SamplingInputs:
    """Rows that sample by every rule there is. What they choose means nothing."""
    of_rows = np.ones(num_rows)
    lists = RowLists(
        starts=np.arange(num_rows + 1, dtype=np.int32), ids=np.zeros(num_rows, dtype=np.int32)
    )
    return SamplingInputs(
        temperatures=of_rows.astype(np.float32),
        top_ks=np.full(num_rows, max(1, vocab_size // 2), dtype=np.int32),
        top_ps=of_rows / 2,
        min_p_offsets=-10 * of_rows,
        uniforms=of_rows / 2,
        repetition_penalties=2 * of_rows.astype(np.float32),
        presence_penalties=of_rows.astype(np.float32),
        frequency_penalties=of_rows.astype(np.float32),
        wants_log_prob=of_rows.astype(np.int32),
        is_left=np.zeros(num_rows, dtype=np.int32),
        slots=np.arange(num_rows, dtype=np.int32),
        fresh_slots=np.arange(num_rows, dtype=np.int32),
        counted=lists,
        biased=lists,
        biases=of_rows.astype(np.float32),
        masked=lists,
        normalize_log_probs=True,
    )


def measure_kv_memory(
    decoder: DeviceDecoder,
    sampler: DeviceSampler,
    shape: KvShape,
    limits: RowLimits,
    runtime: DeviceRuntime,
) -> int | None:
    """Bytes that the KV cache may take: what is free on the device, once the largest forward has
    what it takes and the scratch block has its own. None: the device has no memory of its own.

    Raises RuntimeError (torch.OutOfMemoryError on a GPU) where not even that forward fits.
    """
    if runtime.memory is None:
        return None
    with runtime.computing():
        free = free_beside(
            runtime.memory,
            lambda: _largest_forward(decoder, sampler, shape, limits, runtime),
        )
    scratch = limits.tokens_per_block * shape.bytes_per_token
    return max(0, free - scratch)


def free_beside(memory: DeviceMemory, make_work: Callable[[], Callable[[], object]]) -> int:
    """Bytes that are left when work has what it takes at most; may be negative. It runs once, and
    nothing stays of what ``make_work`` makes for it."""
    work = make_work()
    taken = memory.largest_use(work)
    del work
    memory.release()
    return memory.free() - taken


def _largest_forward(
    decoder: DeviceDecoder,
    sampler: DeviceSampler,
    shape: KvShape,
    limits: RowLimits,
    runtime: DeviceRuntime,
) -> Callable[[], object]:
    """With sampling, on buffers and KV storage of its own."""
    rows = largest_inputs(limits, decoder.max_seq_len)
    sampling = every_rule(len(rows.logits_indices), decoder.spec.vocab_size)
    inputs = replace(rows, sampling=sampling)
    num_blocks = int(inputs.slot_mapping.max()) // limits.tokens_per_block + 1
    buffer = RowBuffer(limits, runtime)
    storage = shape.allocate(num_blocks, limits.tokens_per_block, runtime.device)

    def forward() -> object:
        logits = decoder.forward(buffer.take(inputs), storage)
        sampling_rows = buffer.sampling(sampling, sampler.counts)
        likeliest = decoder.ops.likeliest(logits)
        return sampler.sample(decoder.ops, logits, likeliest, sampling_rows)

    return forward
