"""KernelOps: a decoder's operations on the kernels in Triton's language.

Importing this module raises ConfigError where Triton is not installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels import activations, blocks, rope
from inflight.kernels import attention as paged
from inflight.kernels.combine import combine
from inflight.kernels.expert_linears import expert_gate_ups, expert_linears
from inflight.kernels.launch import AttentionLaunches
from inflight.kernels.likeliest import likeliest, likeliest_parts
from inflight.kernels.logit_edits import edit_logits
from inflight.kernels.rms_norm import rms_norm
from inflight.kernels.routing import Routing, route
from inflight.kernels.sampling import sample
from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.ops import ExpertTensors, LayerRules
from inflight.model.device.rows import DeviceRows
from inflight.model.fused.spec import DecoderSpec, ExpertsSpec, MlpSpec


class KernelOps:
    """DeviceOps for one decoder. Nothing waits for the device, so all of it can be captured."""

    def __init__(
        self, spec: DecoderSpec, launches: AttentionLaunches, device: torch.device
    ) -> None:
        """Raises RuntimeError (torch.OutOfMemoryError on a GPU) when there is no room for what
        attention needs beside its rows."""
        self._plan = paged.AttentionPlan.allocate(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            launches=launches,
            device=device,
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, delta: Tensor | None = None
    ) -> None:
        rms_norm(x, weight, epsilon, out, delta=delta)

    def activated(self, x: Tensor, mlp: MlpSpec) -> Tensor:
        out = x.new_empty(len(x), mlp.intermediate_size)
        if mlp.is_gated:
            activations.gated_product(x, out, mlp.activation)
        else:
            activations.activate(x, out, mlp.activation)
        return out

    def mixed(
        self,
        x: Tensor,
        logits: Tensor,
        tensors: ExpertTensors,
        experts: ExpertsSpec,
        shared: Tensor | None,
    ) -> Tensor:
        num_rows, hidden_size = x.shape
        routing = Routing.allocate(
            num_rows,
            num_experts=experts.num_experts,
            num_chosen=experts.num_experts_per_token,
            num_shared=0 if shared is None else 1,
            device=x.device,
        )
        route(logits, routing, is_softmax_of_chosen=experts.is_softmax_of_chosen)
        num_results = num_rows * experts.num_experts_per_token
        inner = x.new_empty(num_results, experts.mlp.intermediate_size)
        activation, gate_up_scales = experts.mlp.gated_activation, tensors.gate_up_scales
        expert_gate_ups(x, tensors.gate_ups, routing, inner, activation, scales=gate_up_scales)
        results = x.new_empty(num_results, hidden_size)
        expert_linears(inner, tensors.downs, routing, results, scales=tensors.down_scales)
        out = torch.empty_like(x)
        combine(results, routing, shared, out)
        return out

    def attend(self, qkv: Tensor, cache: Tensor, rows: DeviceRows, rules: LayerRules) -> Tensor:
        shape = (len(qkv), rules.num_heads, rules.head_dim)
        query = qkv.new_empty(shape, dtype=cache.dtype)
        out = qkv.new_empty(shape, dtype=cache.dtype)
        rope.rope_and_write(qkv, query, cache, rows.position_ids, rows.slot_mapping, rules)
        self._attend(query, cache, rows, rules, out)
        return out.flatten(1).to(qkv.dtype)

    def _attend(
        self, query: Tensor, cache: Tensor, rows: DeviceRows, rules: LayerRules, out: Tensor
    ) -> None:
        """As ``kernels.attention.attend``."""
        paged.attend(query, cache, attention_rows(rows), rules, out, self._plan)

    def likeliest(self, logits: Tensor) -> Tensor:
        num_rows, vocab_size = logits.shape
        answers = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
        room = num_rows * likeliest_parts(vocab_size)
        likeliest(
            logits,
            answers[0],
            answers[1].view(torch.float32),
            (logits.new_empty(room), answers.new_empty(room)),
        )
        return answers

    def edit_logits(self, logits: Tensor, rows: SamplingRows) -> None:
        edit_logits(logits, rows)

    def sample(self, logits: Tensor, rows: SamplingRows, ids: Tensor, log_probs: Tensor) -> None:
        sample(logits, rows, ids, log_probs)

    def copy_blocks(self, storage: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        blocks.copy_blocks(storage, source_ids, target_ids)

    def gather_blocks(self, storage: Tensor, ids: Tensor) -> Tensor:
        block_bytes = storage[:, :, 0].nbytes
        flat = torch.empty(len(ids), block_bytes, dtype=torch.uint8, device=storage.device)
        blocks.gather_blocks(storage, ids, flat)
        return flat

    def scatter_blocks(self, storage: Tensor, ids: Tensor, contents: Tensor) -> None:
        blocks.scatter_blocks(storage, ids, contents)


def attention_rows(rows: DeviceRows) -> paged.AttentionRows:
    return paged.AttentionRows(
        cu_seqlens_q=rows.cu_seqlens_q,
        context_lens=rows.context_lens,
        block_tables=rows.block_tables,
        num_context_sequences=rows.num_context_sequences,
        num_context_tokens=rows.num_context_tokens,
        longest=rows.longest,
    )
