"""DecoderWeights: a checkpoint's tensors, fused and packed as the operations take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.model.fused.spec import DecoderSpec, LayerSpec, MlpSpec, QkNorm
from inflight.model.fused.stored_blocks import StoredBlocks
from inflight.model.fused.tensors import CheckpointTensors
from inflight.native.experts import LinearGroup
from inflight.native.gguf_blocks import GgufBlocks
from inflight.native.packed import (
    PackedLinear,
    WeightKind,
    pack_blocks,
    pack_gate_up,
    pack_gate_up_blocks,
    pack_linear,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormWeights:
    """float32[hidden_size]."""

    weight: Tensor
    """The spec's offset is added."""
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpWeights:
    up: PackedLinear
    """With a gate: both together."""
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertsWeights:
    router: PackedLinear
    """A row for each expert, and where there is a shared expert a last one for its gate; never
    quantized, because which experts run hangs on small differences."""
    gate_ups: LinearGroup
    downs: LinearGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """A norm is None where the layer has none; ``mlp`` and ``experts`` are as in LayerSpec."""

    before_attention: NormWeights | None
    after_attention: NormWeights | None
    before_mlp: NormWeights | None
    after_mlp: NormWeights | None
    q_norm: Tensor | None
    """float32 of the size that QkNorm says, the spec's offset added; as the next."""
    k_norm: Tensor | None
    qkv: PackedLinear
    """Rows of the query heads, then of the key heads, then of the value heads."""
    output: PackedLinear
    mlp: MlpWeights | None
    experts: ExpertsWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    embedding: Tensor
    """[vocab_size, hidden_size] in the dtype of the activations; not copied from the checkpoint's
    file where that has the same dtype."""
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    """Of the last hidden state; logits_multiplier is in it."""
    head: PackedLinear


def load_weights(
    tensors: CheckpointTensors,
    spec: DecoderSpec,
    kind: WeightKind,
    dtype: torch.dtype,
    *,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> DecoderWeights:
    """``kind``: of all linears but routers and what ``StoredBlocks`` says; ``dtype``: of
    activations. ``on_layer`` is called when a layer is done. Raises CheckpointError: tensors are
    missing, have other shapes than ``spec`` says, or cannot be quantized."""
    return _Loader(tensors, spec, kind).load(dtype, on_layer)


class _Loader:
    def __init__(self, tensors: CheckpointTensors, spec: DecoderSpec, kind: WeightKind) -> None:
        self._tensors = tensors
        self._spec = spec
        self._names = spec.names
        self._kind: WeightKind = kind
        self._stored = StoredBlocks(tensors, kind)

    def load(self, dtype: torch.dtype, on_layer: Callable[[int], None]) -> DecoderWeights:
        spec, names = self._spec, self._names
        shape = (spec.vocab_size, spec.hidden_size)
        table = self._tensors.tensor(f"{names.embedding}.weight", *shape)
        head, bias = table, None
        if not spec.has_tied_head:
            head, bias = self._rows(names.head, *shape, spec.head_bias)
        layers = []
        for i, layer in enumerate(spec.layers):
            layers.append(self._layer(f"{names.layers}.{i}", layer))
            on_layer(i)
        return DecoderWeights(
            embedding=table.to(dtype),
            layers=tuple(layers),
            norm=self._norm(names.final_norm, spec.logits_multiplier),
            head=self._pack([names.embedding if spec.has_tied_head else names.head], head, bias),
        )

    def _layer(self, name: str, layer: LayerSpec) -> LayerWeights:
        spec = self._spec
        norms, attention = spec.norms, f"{name}.{self._names.attention}"
        mlp_name = self._names.mlp if layer.experts is None else self._names.shared_expert
        return LayerWeights(
            before_attention=self._layer_norm(name, norms.before_attention),
            after_attention=self._layer_norm(name, norms.after_attention),
            before_mlp=self._layer_norm(name, norms.before_mlp),
            after_mlp=self._layer_norm(name, norms.after_mlp),
            q_norm=self._head_norm(f"{attention}.q_norm", spec.num_heads),
            k_norm=self._head_norm(f"{attention}.k_norm", spec.num_kv_heads),
            qkv=self._pack(self._qkv_names(attention), *self._qkv(attention, layer)),
            output=self._linear(
                f"{attention}.{self._names.output}",
                spec.hidden_size,
                spec.query_size,
                spec.output_bias,
            ),
            mlp=None if layer.mlp is None else self._mlp(f"{name}.{mlp_name}", layer.mlp),
            experts=self._experts(name, layer),
        )

    def _qkv(self, attention: str, layer: LayerSpec) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the three together."""
        spec = self._spec
        if self._names.qkv is not None:
            name = f"{attention}.{self._names.qkv}"
            weight, bias = self._rows(name, spec.qkv_size, spec.hidden_size, spec.qkv_bias)
            if not spec.has_qkv_by_head:
                return weight, bias
            return _by_kind(weight, spec.head_dim), (
                None if bias is None else _by_kind(bias, spec.head_dim)
            )
        parts = [
            self._rows(f"{attention}.{name}", size, spec.hidden_size, spec.qkv_bias)
            for name, size in (
                ("q_proj", spec.query_size),
                ("k_proj", spec.kv_size),
                ("v_proj", spec.kv_size),
            )
        ]
        weights = [weight for weight, _ in parts]
        biases = [bias for _, bias in parts if bias is not None]
        if spec.has_interleaved_rope and layer.rope is not None:
            num_turning = 2 * len(layer.rope.inverse_frequencies)
            for rows in (weights, biases):
                rows[:2] = [_in_halves(part, spec.head_dim, num_turning) for part in rows[:2]]
        return torch.cat(weights), torch.cat(biases) if biases else None

    def _qkv_names(self, attention: str) -> Sequence[str]:
        """Under which names the checkpoint has the rows in our order; none where it has another."""
        if self._spec.has_qkv_by_head or self._spec.has_interleaved_rope:
            return ()
        own = self._names.qkv
        names = ("q_proj", "k_proj", "v_proj") if own is None else (own,)
        return tuple(f"{attention}.{name}" for name in names)

    def _mlp(self, name: str, mlp: MlpSpec) -> MlpWeights:
        hidden_size, names = self._spec.hidden_size, self._names
        size = (mlp.intermediate_size, hidden_size)
        if mlp.is_gated:
            up = self._gate_up(name, mlp)
        else:
            up = self._linear(f"{name}.{names.up}", *size, mlp.has_bias)
        return MlpWeights(
            up=up,
            down=self._linear(
                f"{name}.{names.down}", hidden_size, mlp.intermediate_size, mlp.has_bias
            ),
        )

    def _gate_up(self, name: str, mlp: MlpSpec) -> PackedLinear:
        names, (n, k) = self._names, (mlp.intermediate_size, self._spec.hidden_size)
        if names.gate_up is not None:
            both, both_bias = self._rows(f"{name}.{names.gate_up}", 2 * n, k, mlp.has_bias)
            gate, up = both.chunk(2)
            gate_bias, up_bias = (None, None) if both_bias is None else both_bias.chunk(2)
        else:
            gate, gate_bias = self._rows(f"{name}.{names.gate}", n, k, mlp.has_bias)
            up, up_bias = self._rows(f"{name}.{names.up}", n, k, mlp.has_bias)
        if gate_bias is None or up_bias is None:
            return self._pack_gate_up(name, gate, up)
        return pack_gate_up(gate, up, self._kind, (gate_bias, up_bias))

    def _pack_gate_up(self, name: str, gate: Tensor, up: Tensor) -> PackedLinear:
        names = self._names
        both = [names.gate, names.up] if names.gate_up is None else [names.gate_up]
        wanted = [f"{name}.{each}" for each in both]
        blocks = self._stored.of(wanted, len(gate) + len(up), gate.shape[1])
        if blocks is None:
            return pack_gate_up(gate, up, self._stored.kind_for(wanted))
        gate_blocks, up_blocks = torch.split(blocks.blocks, len(gate))
        return pack_gate_up_blocks(
            GgufBlocks(blocks.kind, gate_blocks), GgufBlocks(blocks.kind, up_blocks)
        )

    def _experts(self, name: str, layer: LayerSpec) -> ExpertsWeights | None:
        if layer.experts is None:
            return None
        names, hidden_size = self._names, self._spec.hidden_size
        num_experts, mlp = layer.experts.num_experts, layer.experts.mlp
        router, _ = self._rows(f"{name}.{names.router}", num_experts, hidden_size, False)
        if layer.mlp is not None:
            gate, _ = self._rows(f"{name}.{names.shared_expert_gate}", 1, hidden_size, False)
            router = torch.cat((router, gate))
        mlps = [self._mlp(f"{name}.{names.experts}.{i}", mlp) for i in range(num_experts)]
        return ExpertsWeights(
            router=pack_linear(router, None, "f32" if self._kind == "f32" else "bf16"),
            gate_ups=LinearGroup(tuple(mlp.up for mlp in mlps)),
            downs=LinearGroup(tuple(mlp.down for mlp in mlps)),
        )

    def _linear(self, name: str, n: int, k: int, has_bias: bool) -> PackedLinear:
        return self._pack([name], *self._rows(name, n, k, has_bias))

    def _pack(self, names: Sequence[str], weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """``weight`` is that of ``names`` under each other, whose blocks are taken where they run
        as they are stored."""
        blocks = self._stored.of(names, *weight.shape)
        if blocks is not None:
            return pack_blocks(blocks, bias)
        return pack_linear(weight, bias, self._stored.kind_for(names))

    def _rows(self, name: str, n: int, k: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._tensors.tensor(f"{name}.weight", n, k)
        return weight, self._tensors.tensor(f"{name}.bias", n) if has_bias else None

    def _layer_norm(self, layer: str, name: str | None) -> NormWeights | None:
        return None if name is None else self._norm(f"{layer}.{name}")

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
