"""DecoderTensors: which of a checkpoint's tensors make up each linear and norm, in our order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.model.fused.spec import DecoderSpec, LayerSpec, MlpSpec, QkNorm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormWeights:
    """float32[hidden_size]."""

    weight: Tensor
    """The spec's offset is added."""
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearRows:
    """W [n, k] and its bias [n], as the checkpoint stores their numbers."""

    weight: Tensor
    bias: Tensor | None
    names: Sequence[str] = ()
    """The checkpoint's weights that, under each other, are ``weight``; none where it has another
    order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GateUpRows:
    """A gate and its up projection, both W [n, k]; biases [n], of both or of none."""

    gate: Tensor
    up: Tensor
    biases: tuple[Tensor, Tensor] | None
    names: Sequence[str]
    """As in LinearRows, of the gate over the up projection."""


class TensorSource(Protocol):
    def tensor(self, name: str, *shape: int) -> Tensor:
        """As ``CheckpointTensors.tensor``."""
        ...


class DecoderTensors:
    """Tensors are read when they are asked for, and lie where ``tensors`` puts them.

    Every method raises CheckpointError: tensors are missing, or have other shapes than the spec
    says.
    """

    def __init__(self, tensors: TensorSource, spec: DecoderSpec) -> None:
        self._tensors = tensors
        self._spec = spec
        self._names = spec.names

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._tensors.tensor(f"{self._names.embedding}.weight", *self._vocabulary)

    def head(self) -> LinearRows:
        """Where it is tied, the embedding again."""
        if self._spec.has_tied_head:
            return self.linear(self._names.embedding, *self._vocabulary, False)
        return self.linear(self._names.head, *self._vocabulary, self._spec.head_bias)

    def final_norm(self) -> NormWeights:
        """With logits_multiplier in it."""
        return self._norm(self._names.final_norm, self._spec.logits_multiplier)

    def norm(self, layer: int, name: str | None) -> NormWeights | None:
        """``name``: a field of NormNames."""
        return None if name is None else self._norm(f"{self._layer(layer)}.{name}")

    def q_norm(self, layer: int) -> Tensor | None:
        """float32 of the size that QkNorm says, the spec's offset added; None: there is none."""
        return self._head_norm(f"{self._attention(layer)}.q_norm", self._spec.num_heads)

    def k_norm(self, layer: int) -> Tensor | None:
        """As ``q_norm``."""
        return self._head_norm(f"{self._attention(layer)}.k_norm", self._spec.num_kv_heads)

    def qkv(self, layer: int) -> LinearRows:
        """Rows of the query heads, then of the key heads, then of the value heads."""
        attention = self._attention(layer)
        if self._names.qkv is not None:
            return self._stored_together(f"{attention}.{self._names.qkv}")
        return self._put_together(attention, self._spec.layers[layer])

    def output(self, layer: int) -> LinearRows:
        spec, name = self._spec, f"{self._attention(layer)}.{self._names.output}"
        return self.linear(name, spec.hidden_size, spec.query_size, spec.output_bias)

    def mlp_name(self, layer: int) -> str:
        """What ``gate_up``, ``up`` and ``down`` take for the layer's MLP or shared expert."""
        has_experts = self._spec.layers[layer].experts is not None
        own = self._names.shared_expert if has_experts else self._names.mlp
        return f"{self._layer(layer)}.{own}"

    def expert_name(self, layer: int, expert: int) -> str:
        """As ``mlp_name``, for one of a layer's experts."""
        return f"{self._layer(layer)}.{self._names.experts}.{expert}"

    def gate_up(self, name: str, mlp: MlpSpec) -> GateUpRows:
        names, (n, k) = self._names, (mlp.intermediate_size, self._spec.hidden_size)
        if names.gate_up is not None:
            both = self.linear(f"{name}.{names.gate_up}", 2 * n, k, mlp.has_bias)
            gate, up = both.weight.chunk(2)
            gate_bias, up_bias = (None, None) if both.bias is None else both.bias.chunk(2)
            stored = tuple(both.names)
        else:
            of_gate = self.linear(f"{name}.{names.gate}", n, k, mlp.has_bias)
            of_up = self.linear(f"{name}.{names.up}", n, k, mlp.has_bias)
            gate, gate_bias, up, up_bias = of_gate.weight, of_gate.bias, of_up.weight, of_up.bias
            stored = (*of_gate.names, *of_up.names)
        biases = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        return GateUpRows(gate=gate, up=up, biases=biases, names=stored)

    def up(self, name: str, mlp: MlpSpec) -> LinearRows:
        """Of an MLP without a gate."""
        size = (mlp.intermediate_size, self._spec.hidden_size)
        return self.linear(f"{name}.{self._names.up}", *size, mlp.has_bias)

    def down(self, name: str, mlp: MlpSpec) -> LinearRows:
        size = (self._spec.hidden_size, mlp.intermediate_size)
        return self.linear(f"{name}.{self._names.down}", *size, mlp.has_bias)

    def router(self, layer: int) -> Tensor:
        """[num_experts, hidden_size], and where there is a shared expert a last row for its
        gate."""
        spec, name = self._spec.layers[layer], self._layer(layer)
        assert spec.experts is not None
        num_experts, hidden_size = spec.experts.num_experts, self._spec.hidden_size
        own = self.linear(f"{name}.{self._names.router}", num_experts, hidden_size, False)
        if spec.mlp is None:
            return own.weight
        shared = self.linear(f"{name}.{self._names.shared_expert_gate}", 1, hidden_size, False)
        return torch.cat((own.weight, shared.weight))

    def linear(self, name: str, n: int, k: int, has_bias: bool) -> LinearRows:
        """The checkpoint's own, W [n, k]."""
        return LinearRows(
            weight=self._tensors.tensor(f"{name}.weight", n, k),
            bias=self._tensors.tensor(f"{name}.bias", n) if has_bias else None,
            names=(name,),
        )

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return self._spec.vocab_size, self._spec.hidden_size

    def _layer(self, layer: int) -> str:
        return f"{self._names.layers}.{layer}"

    def _attention(self, layer: int) -> str:
        return f"{self._layer(layer)}.{self._names.attention}"

    def _stored_together(self, name: str) -> LinearRows:
        spec = self._spec
        rows = self.linear(name, spec.qkv_size, spec.hidden_size, spec.qkv_bias)
        if not spec.has_qkv_by_head:
            return rows
        bias = None if rows.bias is None else _by_kind(rows.bias, spec.head_dim)
        return LinearRows(weight=_by_kind(rows.weight, spec.head_dim), bias=bias)

    def _put_together(self, attention: str, layer: LayerSpec) -> LinearRows:
        spec = self._spec
        sizes = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        parts = [
            self.linear(f"{attention}.{name}", size, spec.hidden_size, spec.qkv_bias)
            for name, size in sizes.items()
        ]
        weights = [part.weight for part in parts]
        biases = [part.bias for part in parts if part.bias is not None]
        if spec.has_interleaved_rope and layer.rope is not None:
            num_turning = 2 * len(layer.rope.inverse_frequencies)
            for rows in (weights, biases):
                rows[:2] = [_in_halves(part, spec.head_dim, num_turning) for part in rows[:2]]
        return LinearRows(
            weight=torch.cat(weights),
            bias=torch.cat(biases) if biases else None,
            names=() if spec.has_interleaved_rope else [name for p in parts for name in p.names],
        )

    def _head_norm(self, name: str, num_heads: int) -> Tensor | None:
        if self._spec.qk_norm is QkNorm.NONE:
            return None
        num_spanned = num_heads if self._spec.qk_norm is QkNorm.WHOLE_ROW else 1
        return self._scale(name, num_spanned * self._spec.head_dim)

    def _norm(self, name: str, multiplier: float = 1.0) -> NormWeights:
        size, bias = self._spec.hidden_size, None
        if self._spec.norm_bias:
            bias = (self._tensors.tensor(f"{name}.bias", size).float() * multiplier).contiguous()
        return NormWeights(weight=self._scale(name, size) * multiplier, bias=bias)

    def _scale(self, name: str, size: int) -> Tensor:
        weight = self._tensors.tensor(f"{name}.weight", size).float()
        return (weight + self._spec.norm_offset).contiguous()


def _by_kind(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of query, key and value of each head, as all queries, then keys, then values."""
    by_head = rows.reshape(-1, 3, head_dim, *rows.shape[1:])
    return by_head.transpose(0, 1).flatten(0, 2)


def _in_halves(rows: Tensor, head_dim: int, num_turning: int) -> Tensor:
    """Rows of heads in which dimension 2i turns with 2i + 1, in the order in which i turns with
    i + num_turning / 2."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    turning = heads[:, :num_turning]
    parts = (turning[:, 0::2], turning[:, 1::2], heads[:, num_turning:])
    return torch.cat(parts, dim=1).flatten(0, 1)
