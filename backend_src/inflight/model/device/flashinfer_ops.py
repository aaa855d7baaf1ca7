"""FlashInferOps: KernelOps whose attention runs on FlashInfer, but for CUDA graphs.

A graph would need FlashInfer's wrappers for its own number of rows and each set of score rules,
with buffers of their own, and a plan on the host before every replay. Our kernels need no plan, so
graphs keep them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels import attention as paged
from inflight.kernels.launch import AttentionLaunches
from inflight.model.device.flashinfer_attention import FlashInferAttention, Phases
from inflight.model.device.kernel_ops import KernelOps, attention_rows
from inflight.model.device.ops import LayerRules
from inflight.model.device.rows import DeviceRows
from inflight.model.fused.spec import DecoderSpec


class FlashInferOps(KernelOps):
    """DeviceOps. What FlashInfer does not do, our kernels do: a phase that is faster on them, rows
    of graphs, layers with sinks."""

    def __init__(
        self,
        spec: DecoderSpec,
        launches: AttentionLaunches,
        device: torch.device,
        attention: FlashInferAttention,
        phases: Phases,
    ) -> None:
        super().__init__(spec, launches, device)
        self.phases = phases
        self._attention = attention
        self._planned: DeviceRows | None = None
        """The rows of the iteration that is planned: all of its layers find the same object."""

    def _attend(
        self, query: Tensor, cache: Tensor, rows: DeviceRows, rules: LayerRules, out: Tensor
    ) -> None:
        if rows.packed is None or rules.sinks is not None:
            super()._attend(query, cache, rows, rules, out)
            return
        if self._planned is not rows:
            self._attention.plan(rows.packed, self.phases)
            self._planned = rows
        own, first = attention_rows(rows), rows.num_context_tokens
        if own.num_context_sequences and self.phases.contexts:
            self._attention.attend_contexts(query[:first], cache, rules, out[:first])
        elif own.num_context_sequences:
            paged.attend_contexts(query, cache, own, rules, out, self._plan)
        if own.num_generations and self.phases.generations:
            self._attention.attend_generations(query[first:], cache, rules, out[first:])
        elif own.num_generations:
            paged.attend_generations(query, cache, own, rules, out, self._plan)
