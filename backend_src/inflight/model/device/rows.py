"""DeviceRows: the rows of an iteration on the device, and the buffer that they lie in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.batch.device_sampling import SamplingInputs
from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.device.staging import RowLayout, RowLimits, StagedRows
from inflight.model.runner import PackedInputs

_DTYPES = {"int32": torch.int32, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceRows:
    """Tensors are int32 on the device, as ``PackedInputs`` describes them; numbers are the host's.

    A captured CUDA graph keeps their addresses: the next iteration finds other rows there.
    """

    token_ids: Tensor
    """[T], as the next two."""
    position_ids: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor | None
    """[R]; None: every row, in order."""
    cu_seqlens_q: Tensor
    """[S + 1]."""
    context_lens: Tensor
    """[S]."""
    block_tables: Tensor
    """[S, most blocks of a sequence]."""
    num_context_sequences: int
    num_context_tokens: int
    longest: int
    """No sequence has more tokens in the KV cache."""
    packed: PackedInputs | None
    """The same on the host, valid in this iteration; None: of a CUDA graph, which is captured
    before there are any."""


class RowBuffer:
    """A buffer of the host and its copy on the device, both made once; all of it is used inside of
    ``computing``."""

    def __init__(self, limits: RowLimits, runtime: DeviceRuntime) -> None:
        layout = RowLayout.of(limits)
        self._host = runtime.pinned(layout.size, torch.int32)
        self._device = torch.zeros(layout.size, dtype=torch.int32, device=runtime.device)
        self._staged = StagedRows(limits, self._host.numpy())
        self._runtime = runtime
        self._copied = runtime.mark()
        """Once it is reached, the host's buffer may be filled again."""

    def take(self, inputs: PackedInputs) -> DeviceRows:
        """The rows as they are, on their way to the device."""
        self._copied.wait()
        self._copy(self._staged.fill(inputs))
        num_tokens, num_wanted = len(inputs.token_ids), len(inputs.logits_indices)
        all_wanted = num_wanted == num_tokens
        return self._rows(
            num_tokens,
            len(inputs.context_lens),
            num_wanted=None if all_wanted else num_wanted,
            num_context_sequences=inputs.num_context_sequences,
            num_context_tokens=inputs.num_context_tokens,
            longest=int(inputs.context_lens.max()),
            packed=inputs,
        )

    def take_generations(self, inputs: PackedInputs, num_rows: int, scratch_block: int) -> None:
        """Generations and what fills ``num_rows`` up, to where ``generations`` has them."""
        self._copied.wait()
        self._copy(self._staged.fill_generations(inputs, num_rows, scratch_block))

    def sampling(self, inputs: SamplingInputs, counts: Tensor) -> SamplingRows:
        """How the rows taken last, which came with ``inputs``, are sampled; ``counts``: as in
        SamplingRows."""

        tensors = {
            name: self._device[section.start : section.stop].view(_DTYPES[section.dtype])
            for name, section in self._staged.sampling.items()
        }
        return SamplingRows(
            **tensors,
            counts=counts,
            has_penalties=inputs.has_penalties,
            normalize_log_probs=inputs.normalize_log_probs,
        )

    def generations(self, num_rows: int, longest: int) -> DeviceRows:
        """So many generations that all sample, whatever the buffer holds of them."""
        return self._rows(
            num_rows,
            num_rows,
            num_wanted=None,
            num_context_sequences=0,
            num_context_tokens=0,
            longest=longest,
            packed=None,
        )

    def _copy(self, count: int) -> None:
        self._device[:count].copy_(self._host[:count], non_blocking=True)
        self._copied = self._runtime.mark()

    def _rows(
        self,
        num_tokens: int,
        num_sequences: int,
        *,
        num_wanted: int | None,
        num_context_sequences: int,
        num_context_tokens: int,
        longest: int,
        packed: PackedInputs | None,
    ) -> DeviceRows:
        layout = self._staged.layout

        def section(start: int, count: int) -> Tensor:
            return self._device[start : start + count]

        tables = section(layout.block_tables, num_sequences * layout.table_stride)
        wanted = None if num_wanted is None else section(layout.logits_indices, num_wanted)
        return DeviceRows(
            token_ids=section(layout.token_ids, num_tokens),
            position_ids=section(layout.position_ids, num_tokens),
            slot_mapping=section(layout.slot_mapping, num_tokens),
            logits_indices=wanted,
            cu_seqlens_q=section(layout.cu_seqlens_q, num_sequences + 1),
            context_lens=section(layout.context_lens, num_sequences),
            block_tables=tables.view(num_sequences, layout.table_stride),
            num_context_sequences=num_context_sequences,
            num_context_tokens=num_context_tokens,
            longest=longest,
            packed=packed,
        )
