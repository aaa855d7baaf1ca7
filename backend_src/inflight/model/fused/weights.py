"""DecoderWeights: a checkpoint's tensors, fused and packed as the operations take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.model.fused.decoder_tensors import (
    DecoderTensors,
    GateUpRows,
    LinearRows,
    NormWeights,
)
from inflight.model.fused.spec import DecoderSpec, LayerSpec, MlpSpec
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
    packer = _Packer(DecoderTensors(tensors, spec), StoredBlocks(tensors, kind), kind)
    layers = []
    for i, layer in enumerate(spec.layers):
        layers.append(packer.layer(i, layer, spec))
        on_layer(i)
    return packer.decoder(tuple(layers), dtype)


class _Packer:
    def __init__(self, tensors: DecoderTensors, stored: StoredBlocks, kind: WeightKind) -> None:
        self._tensors = tensors
        self._stored = stored
        self._kind: WeightKind = kind

    def decoder(self, layers: tuple[LayerWeights, ...], dtype: torch.dtype) -> DecoderWeights:
        return DecoderWeights(
            embedding=self._tensors.embedding().to(dtype),
            layers=layers,
            norm=self._tensors.final_norm(),
            head=self._pack(self._tensors.head()),
        )

    def layer(self, i: int, layer: LayerSpec, spec: DecoderSpec) -> LayerWeights:
        tensors, norms = self._tensors, spec.norms
        return LayerWeights(
            before_attention=tensors.norm(i, norms.before_attention),
            after_attention=tensors.norm(i, norms.after_attention),
            before_mlp=tensors.norm(i, norms.before_mlp),
            after_mlp=tensors.norm(i, norms.after_mlp),
            q_norm=tensors.q_norm(i),
            k_norm=tensors.k_norm(i),
            qkv=self._pack(tensors.qkv(i)),
            output=self._pack(tensors.output(i)),
            mlp=None if layer.mlp is None else self._mlp(tensors.mlp_name(i), layer.mlp),
            experts=self._experts(i, layer),
        )

    def _mlp(self, name: str, mlp: MlpSpec) -> MlpWeights:
        if mlp.is_gated:
            up = self._pack_gate_up(self._tensors.gate_up(name, mlp))
        else:
            up = self._pack(self._tensors.up(name, mlp))
        return MlpWeights(up=up, down=self._pack(self._tensors.down(name, mlp)))

    def _experts(self, i: int, layer: LayerSpec) -> ExpertsWeights | None:
        if layer.experts is None:
            return None
        router, mlp = self._tensors.router(i), layer.experts.mlp
        names = [self._tensors.expert_name(i, e) for e in range(layer.experts.num_experts)]
        mlps = [self._mlp(name, mlp) for name in names]
        return ExpertsWeights(
            router=pack_linear(router, None, "f32" if self._kind == "f32" else "bf16"),
            gate_ups=LinearGroup(tuple(mlp.up for mlp in mlps)),
            downs=LinearGroup(tuple(mlp.down for mlp in mlps)),
        )

    def _pack(self, rows: LinearRows) -> PackedLinear:
        """In the blocks that its weights are stored in, where they run as they are."""
        blocks = self._stored.of(rows.names, *rows.weight.shape)
        if blocks is not None:
            return pack_blocks(blocks, rows.bias)
        return pack_linear(rows.weight, rows.bias, self._stored.kind_for(rows.names))

    def _pack_gate_up(self, rows: GateUpRows) -> PackedLinear:
        gate, up = rows.gate, rows.up
        if rows.biases is not None:
            return pack_gate_up(gate, up, self._kind, rows.biases)
        blocks = self._stored.of(rows.names, len(gate) + len(up), gate.shape[1])
        if blocks is None:
            return pack_gate_up(gate, up, self._stored.kind_for(rows.names))
        gate_blocks, up_blocks = torch.split(blocks.blocks, len(gate))
        return pack_gate_up_blocks(
            GgufBlocks(blocks.kind, gate_blocks), GgufBlocks(blocks.kind, up_blocks)
        )
