"""DecoderWeights: a checkpoint's tensors, fused and packed as the operations take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.model.fused.spec import DecoderSpec, QkNorm
from inflight.model.fused.tensors import CheckpointTensors
from inflight.native.packed import PackedLinear, WeightKind, pack_gate_up, pack_linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Norms are float32 with the offset added, or None where the layer has none."""

    before_attention: Tensor | None
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedLinear
    """Rows of the query heads, then of the key heads, then of the value heads."""
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    embedding: Tensor
    """[vocab_size, hidden_size] in the dtype of the activations; not copied from the checkpoint's
    file where that has the same dtype."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """Of the last hidden state, as in LayerWeights; logits_multiplier is in it."""
    head: PackedLinear


def load_weights(
    tensors: CheckpointTensors, spec: DecoderSpec, kind: WeightKind, dtype: torch.dtype
) -> DecoderWeights:
    """``kind``: of all linears; ``dtype``: of activations. Raises CheckpointError: tensors are
    missing, have other shapes than ``spec`` says, or cannot be quantized."""
    return _Loader(tensors, spec, kind).load(dtype)


class _Loader:
    def __init__(self, tensors: CheckpointTensors, spec: DecoderSpec, kind: WeightKind) -> None:
        self._tensors = tensors
        self._spec = spec
        self._kind: WeightKind = kind

    def load(self, dtype: torch.dtype) -> DecoderWeights:
        spec = self._spec
        shape = (spec.vocab_size, spec.hidden_size)
        table = self._tensors.tensor("model.embed_tokens.weight", *shape)
        head = table if spec.has_tied_head else self._tensors.tensor("lm_head.weight", *shape)
        return DecoderWeights(
            embedding=table.to(dtype),
            layers=tuple(self._layer(f"model.layers.{i}") for i in range(len(spec.layers))),
            norm=self._norm("model.norm", spec.hidden_size) * spec.logits_multiplier,
            head=pack_linear(head, None, self._kind),
        )

    def _layer(self, layer: str) -> LayerWeights:
        spec = self._spec
        norms, attention = spec.norms, f"{layer}.self_attn"
        return LayerWeights(
            before_attention=self._layer_norm(layer, norms.before_attention),
            after_attention=self._layer_norm(layer, norms.after_attention),
            before_mlp=self._layer_norm(layer, norms.before_mlp),
            after_mlp=self._layer_norm(layer, norms.after_mlp),
            q_norm=self._head_norm(f"{attention}.q_norm", spec.num_heads),
            k_norm=self._head_norm(f"{attention}.k_norm", spec.num_kv_heads),
            qkv=self._qkv(attention),
            output=self._linear(
                f"{attention}.o_proj", spec.hidden_size, spec.query_size, spec.output_bias
            ),
            gate_up=self._gate_up(f"{layer}.mlp"),
            down=self._linear(
                f"{layer}.mlp.down_proj", spec.hidden_size, spec.intermediate_size, spec.mlp_bias
            ),
        )

    def _qkv(self, attention: str) -> PackedLinear:
        spec = self._spec
        if spec.has_fused_names:
            return self._linear(
                f"{attention}.qkv_proj", spec.qkv_size, spec.hidden_size, spec.qkv_bias
            )
        sizes = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        parts = [
            self._rows(f"{attention}.{name}", size, spec.hidden_size, spec.qkv_bias)
            for name, size in sizes.items()
        ]
        biases = [bias for _, bias in parts if bias is not None]
        return pack_linear(
            torch.cat([weight for weight, _ in parts]),
            torch.cat(biases) if biases else None,
            self._kind,
        )

    def _gate_up(self, mlp: str) -> PackedLinear:
        spec = self._spec
        size = (spec.intermediate_size, spec.hidden_size)
        if spec.has_fused_names:
            both = self._tensors.tensor(f"{mlp}.gate_up_proj.weight", 2 * size[0], size[1])
            gate, up = both.chunk(2)
            return pack_gate_up(gate, up, self._kind)
        gate, gate_bias = self._rows(f"{mlp}.gate_proj", *size, spec.mlp_bias)
        up, up_bias = self._rows(f"{mlp}.up_proj", *size, spec.mlp_bias)
        biases = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        return pack_gate_up(gate, up, self._kind, biases)

    def _linear(self, name: str, n: int, k: int, has_bias: bool) -> PackedLinear:
        return pack_linear(*self._rows(name, n, k, has_bias), self._kind)

    def _rows(self, name: str, n: int, k: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._tensors.tensor(f"{name}.weight", n, k)
        return weight, self._tensors.tensor(f"{name}.bias", n) if has_bias else None

    def _layer_norm(self, layer: str, name: str | None) -> Tensor | None:
        return None if name is None else self._norm(f"{layer}.{name}", self._spec.hidden_size)

    def _head_norm(self, name: str, num_heads: int) -> Tensor | None:
        if self._spec.qk_norm is QkNorm.NONE:
            return None
        num_spanned = num_heads if self._spec.qk_norm is QkNorm.WHOLE_ROW else 1
        return self._norm(name, num_spanned * self._spec.head_dim)

    def _norm(self, name: str, size: int) -> Tensor:
        weight = self._tensors.tensor(f"{name}.weight", size).float()
        return (weight + self._spec.norm_offset).contiguous()
