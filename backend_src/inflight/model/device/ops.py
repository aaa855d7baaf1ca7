"""DeviceOps: the operations of a decoder on a device, and what they are told of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.rows import DeviceRows
from inflight.model.fused.spec import ExpertsSpec, MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRules:
    """How one layer attends, as ``native.attention.LayerRules`` describes it; tensors are
    contiguous fp32 on the device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    sliding_window: int | None
    cos_sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_epsilon: float
    norm_offset: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTensors:
    """The linears of E experts, contiguous and of the dtype of the activations, or in fp8 (e4m3)
    with a scale for each row; activations stay as they are then."""

    gate_ups: Tensor
    """[E, 2 * intermediate_size, hidden_size]: first the rows of the gate."""
    downs: Tensor
    """[E, hidden_size, intermediate_size]."""
    gate_up_scales: Tensor | None = None
    """fp32[E, 2 * intermediate_size]; of weights in fp8, as the next one."""
    down_scales: Tensor | None = None
    """fp32[E, hidden_size]."""


class DeviceOps(Protocol):
    """None of them waits for the device, but the reference's attention, experts and sampling. The
    KV storage is that of ``kernels/kv_layout.py``."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, delta: Tensor | None = None
    ) -> None:
        """x [T, H] += delta [T, H], in place; then out [T, H] = x / sqrt(mean(x^2) + epsilon) *
        weight fp32[H]. Each of its own dtype; computed in fp32. ``out`` may be ``x``."""
        ...

    def activated(self, x: Tensor, mlp: MlpSpec) -> Tensor:
        """[T, intermediate_size]: activation(gate) * up of x [T, 2 * intermediate_size], or without
        a gate the activation of x."""
        ...

    def mixed(
        self,
        x: Tensor,
        logits: Tensor,
        tensors: ExpertTensors,
        experts: ExpertsSpec,
        shared: Tensor | None,
    ) -> Tensor:
        """[T, hidden_size], new, in x's dtype: what the experts of each row of x make of it, added
        up as ExpertsSpec says. logits fp32[T, E]; where there is a shared expert, which has made
        ``shared`` [T, hidden_size], fp32[T, E + 1]: it counts times the sigmoid of the last one. No
        row changes another."""
        ...

    def attend(self, qkv: Tensor, cache: Tensor, rows: DeviceRows, rules: LayerRules) -> Tensor:
        """[T, num_heads * head_dim], new, in qkv's dtype. Norms and turns the heads of ``qkv``
        [T, (num_heads + 2 * num_kv_heads) * head_dim], writes K and V into their slots of the
        layer's ``cache``, and attends within each sequence."""
        ...

    def likeliest(self, logits: Tensor) -> Tensor:
        """int32[2, R] of logits fp32[R, vocab_size]: the id of each row's largest logit, the lowest
        of equal ones; and below it the bits of that logit in fp32, which is NaN where any logit of
        the row is."""
        ...

    def edit_logits(self, logits: Tensor, rows: SamplingRows) -> None:
        """Counts what ``rows`` has to be counted, also of rows that are left, and edits the others'
        logits fp32[R, vocab_size] in place, as ``sampling.edits.LogitEdits`` says."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows, ids: Tensor, log_probs: Tensor) -> None:
        """ids int32[R] and log_probs fp32[R], 0 where none is wanted, of edited logits
        fp32[R, vocab_size], by the rules of ``sampling.Sampler``; nothing is written of rows that
        are left. The logits of the others have a finite maximum and no NaN."""
        ...

    def copy_blocks(self, storage: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        """Whole blocks in all layers; int32[n]. No target is among the sources of others, or named
        twice."""
        ...

    def gather_blocks(self, storage: Tensor, ids: Tensor) -> Tensor:
        """uint8[n, bytes of a block over all layers], new, of blocks ``ids`` int32[n]: of each
        layer the K and then the V of the block."""
        ...

    def scatter_blocks(self, storage: Tensor, ids: Tensor, contents: Tensor) -> None:
        """What ``gather_blocks`` gave, into blocks ``ids``, all different."""
        ...
