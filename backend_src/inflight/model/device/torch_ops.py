"""TorchOps: a decoder's operations written out in torch; the reference, on any device.

Its attention looks at lengths on the host, once for each sequence, and its experts and its sampling
look there for their rows: they wait for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device import torch_sampling
from inflight.model.device.ops import ExpertTensors, LayerRules
from inflight.model.device.rows import DeviceRows
from inflight.model.fused.spec import ExpertsSpec, MlpSpec


class TorchOps:
    """DeviceOps. Products are taken in the dtype of the activations, all else in fp32."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, delta: Tensor | None = None
    ) -> None:
        if delta is not None:
            x += delta
        numbers = x.float()
        factor = torch.rsqrt(numbers.square().mean(-1, keepdim=True) + epsilon)
        out.copy_(numbers * factor * weight)

    def activated(self, x: Tensor, mlp: MlpSpec) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1) if mlp.is_gated else (x.float(), None)
        if mlp.activation == "silu":
            active = F.silu(gate)
        elif mlp.activation == "relu" or mlp.activation == "relu2":
            active = F.relu(gate) ** (2 if mlp.activation == "relu2" else 1)
        else:
            active = F.gelu(gate, approximate="tanh" if mlp.activation == "gelu_tanh" else "none")
        return (active if up is None else active * up).to(x.dtype)

    def mixed(
        self,
        x: Tensor,
        logits: Tensor,
        tensors: ExpertTensors,
        experts: ExpertsSpec,
        shared: Tensor | None,
    ) -> Tensor:
        of_experts = logits[:, : experts.num_experts]
        # A stable sort, unlike topk, says which of equal logits comes first.
        order = of_experts.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, : experts.num_experts_per_token]
        weights = of_experts.softmax(-1).gather(1, chosen)
        if experts.is_softmax_of_chosen:
            weights /= weights.sum(-1, keepdim=True)
        results = x.new_empty(*chosen.shape, x.shape[1])
        for expert in range(experts.num_experts):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            both = _expert_linear(x[rows], tensors.gate_ups, tensors.gate_up_scales, expert)
            inner = self.activated(both, experts.mlp)
            results[rows, places] = _expert_linear(
                inner, tensors.downs, tensors.down_scales, expert
            )
        total = (results.float() * weights[..., None]).sum(1)
        if shared is not None:
            total += logits[:, -1:].sigmoid() * shared
        return total.to(x.dtype)

    def attend(self, qkv: Tensor, cache: Tensor, rows: DeviceRows, rules: LayerRules) -> Tensor:
        heads = qkv.float().view(len(qkv), -1, rules.head_dim)
        counts = [rules.num_heads, rules.num_kv_heads, rules.num_kv_heads]
        query, key, value = torch.split(heads, counts, dim=1)
        query = _turned(_normalised(query, rules.q_norm, rules), rows.position_ids, rules)
        key = _turned(_normalised(key, rules.k_norm, rules), rows.position_ids, rules)
        tokens_per_block, slots = cache.shape[3], rows.slot_mapping
        blocks, offsets = slots // tokens_per_block, slots % tokens_per_block
        cache[0][blocks, :, offsets] = key.to(cache.dtype)
        cache[1][blocks, :, offsets] = value.to(cache.dtype)
        out = torch.zeros_like(query)
        starts, lengths = rows.cu_seqlens_q.tolist(), rows.context_lens.tolist()
        for sequence, length in enumerate(lengths):
            own = slice(starts[sequence], starts[sequence + 1])
            ids = rows.block_tables[sequence, : -(-length // tokens_per_block)]
            keys, values = (part[ids].transpose(1, 2).flatten(0, 1)[:length] for part in cache)
            out[own] = _attended(query[own].to(cache.dtype), keys, values, rules)
        return out.flatten(1).to(qkv.dtype)

    def likeliest(self, logits: Tensor) -> Tensor:
        largest, ids = logits.max(-1)
        return torch.stack((ids.int(), largest.view(torch.int32)))

    def edit_logits(self, logits: Tensor, rows: SamplingRows) -> None:
        torch_sampling.edit_logits(logits, rows)

    def sample(self, logits: Tensor, rows: SamplingRows, ids: Tensor, log_probs: Tensor) -> None:
        torch_sampling.sample(logits, rows, ids, log_probs)

    def copy_blocks(self, storage: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        storage[:, :, target_ids] = storage[:, :, source_ids]

    def gather_blocks(self, storage: Tensor, ids: Tensor) -> Tensor:
        blocks = storage[:, :, ids].permute(2, 0, 1, 3, 4, 5)
        return blocks.reshape(len(ids), -1).view(torch.uint8)

    def scatter_blocks(self, storage: Tensor, ids: Tensor, contents: Tensor) -> None:
        num_layers, num_parts, _, *block = storage.shape
        blocks = contents.view(storage.dtype).view(len(ids), num_layers, num_parts, *block)
        storage[:, :, ids] = blocks.permute(1, 2, 0, 3, 4, 5)


def _expert_linear(x: Tensor, weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    """[T, n] in x's dtype, by one of ``weights`` [E, n, k] with ``scales`` fp32[E, n] if any."""
    weight = weights[expert].to(x.dtype)
    if scales is None:
        return F.linear(x, weight)
    return (F.linear(x.float(), weight.float()) * scales[expert]).to(x.dtype)


def _attended(query: Tensor, keys: Tensor, values: Tensor, rules: LayerRules) -> Tensor:
    """float32[M, num_heads, D], of the last M tokens of a sequence of L: query [M, num_heads, D],
    keys and values [L, num_kv_heads, D]."""
    num_rows, length = len(query), len(keys)
    group = rules.num_heads // rules.num_kv_heads
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("mhd,lhd->hml", query, keys).float() * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    at = torch.arange(length - num_rows, length, device=query.device)[:, None]
    key_at = torch.arange(length, device=query.device)
    hidden = key_at > at
    if rules.sliding_window is not None:
        hidden |= key_at <= at - rules.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks[:, None, None].expand(-1, num_rows, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :length]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hml,lhd->mhd", weights.to(values.dtype), values).float()


def _normalised(heads: Tensor, weight: Tensor | None, rules: LayerRules) -> Tensor:
    """RMSNorm of [T, heads, head_dim] over as many numbers as there are weights."""
    if weight is None:
        return heads
    spans = heads.reshape(len(heads), -1, len(weight))
    factor = torch.rsqrt(spans.square().mean(-1, keepdim=True) + rules.norm_epsilon)
    normalised: Tensor = spans * factor * (weight + rules.norm_offset)
    return normalised.view_as(heads)


def _turned(heads: Tensor, positions: Tensor, rules: LayerRules) -> Tensor:
    """[T, heads, head_dim] with rope applied."""
    if rules.cos_sin is None:
        return heads
    rotary_dim = rules.cos_sin.shape[1]
    cosines, sines = rules.cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat((*turned, heads[..., rotary_dim:]), dim=-1)
