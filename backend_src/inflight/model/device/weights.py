"""DeviceWeights: a checkpoint's tensors on the device, fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.model.device.linears import (
    FP8_MULTIPLE,
    DenseLinear,
    DeviceLinear,
    Fp8Linear,
    ScaledProduct,
)
from inflight.model.fused.decoder_tensors import DecoderTensors, LinearRows, NormWeights
from inflight.model.fused.spec import DecoderSpec, MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMlp:
    up: DeviceLinear
    """With a gate: both together, first the rows of the gate."""
    down: DeviceLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLayer:
    """As LayerWeights of ``fused/weights.py``, without experts."""

    before_attention: NormWeights | None
    after_attention: NormWeights | None
    before_mlp: NormWeights | None
    after_mlp: NormWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: DeviceLinear
    output: DeviceLinear
    mlp: DeviceMlp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceWeights:
    embedding: Tensor
    """[vocab_size, hidden_size] in the dtype of the activations."""
    layers: tuple[DeviceLayer, ...]
    norm: NormWeights
    """Of the last hidden state; logits_multiplier is in it."""
    head: DenseLinear
    """Never in fp8: logits lie close together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    dtype: torch.dtype
    """Of activations, and of weights unless they are fp8."""
    scaled_product: ScaledProduct | None = None
    """The linears of the layers are in fp8, and this multiplies them. None: in ``dtype``."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> DeviceLinear:
        weight = weight.to(self.dtype)
        bias = None if bias is None else bias.to(self.dtype)
        fits = not any(size % FP8_MULTIPLE for size in weight.shape)
        if self.scaled_product is not None and fits:
            return Fp8Linear(weight, bias, self.scaled_product)
        return DenseLinear(weight.contiguous(), bias)


def load_device_weights(
    tensors: DecoderTensors,
    spec: DecoderSpec,
    form: WeightFormat,
    *,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> DeviceWeights:
    """Where ``tensors`` puts them; ``spec`` has no experts. ``on_layer`` is called when a layer is
    there. Raises CheckpointError as DecoderTensors does, RuntimeError (torch.OutOfMemoryError on a
    GPU) where there is no room."""
    embedding = tensors.embedding().to(form.dtype)
    layers = []
    for i in range(len(spec.layers)):
        layers.append(_layer(tensors, spec, form, i))
        on_layer(i)
    if spec.has_tied_head:
        head = DenseLinear(embedding, None)
    else:
        rows = tensors.head()
        bias = None if rows.bias is None else rows.bias.to(form.dtype)
        head = DenseLinear(rows.weight.to(form.dtype), bias)
    return DeviceWeights(
        embedding=embedding, layers=tuple(layers), norm=tensors.final_norm(), head=head
    )


def _layer(tensors: DecoderTensors, spec: DecoderSpec, form: WeightFormat, i: int) -> DeviceLayer:
    norms, mlp = spec.norms, spec.layers[i].mlp
    assert mlp is not None and spec.layers[i].experts is None

    def linear(rows: LinearRows) -> DeviceLinear:
        return form.linear(rows.weight, rows.bias)

    name = tensors.mlp_name(i)
    return DeviceLayer(
        before_attention=tensors.norm(i, norms.before_attention),
        after_attention=tensors.norm(i, norms.after_attention),
        before_mlp=tensors.norm(i, norms.before_mlp),
        after_mlp=tensors.norm(i, norms.after_mlp),
        q_norm=tensors.q_norm(i),
        k_norm=tensors.k_norm(i),
        qkv=linear(tensors.qkv(i)),
        output=linear(tensors.output(i)),
        mlp=DeviceMlp(
            up=_gate_up(tensors, form, name, mlp)
            if mlp.is_gated
            else linear(tensors.up(name, mlp)),
            down=linear(tensors.down(name, mlp)),
        ),
    )


def _gate_up(tensors: DecoderTensors, form: WeightFormat, name: str, mlp: MlpSpec) -> DeviceLinear:
    rows = tensors.gate_up(name, mlp)
    bias = None if rows.biases is None else torch.cat(rows.biases)
    return form.linear(torch.cat((rows.gate, rows.up)), bias)
