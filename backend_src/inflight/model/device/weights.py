"""DeviceWeights: a checkpoint's tensors on the device, fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.model.device.linears import (
    FP8_DTYPE,
    FP8_MULTIPLE,
    DenseLinear,
    DeviceLinear,
    Fp8Linear,
    ScaledProduct,
    quantize_rows,
)
from inflight.model.device.ops import ExpertTensors
from inflight.model.fused.decoder_tensors import DecoderTensors, LinearRows, NormWeights
from inflight.model.fused.spec import DecoderSpec, ExpertsSpec, MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMlp:
    up: DeviceLinear
    """With a gate: both together, first the rows of the gate."""
    down: DeviceLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceExperts:
    router: DenseLinear
    """A row for each expert, and where there is a shared expert a last one for its gate."""
    tensors: ExpertTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLayer:
    """As LayerWeights of ``fused/weights.py``."""

    before_attention: NormWeights | None
    after_attention: NormWeights | None
    before_mlp: NormWeights | None
    after_mlp: NormWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: DeviceLinear
    output: DeviceLinear
    mlp: DeviceMlp | None
    experts: DeviceExperts | None


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
    """The linears of the layers are in fp8, and this multiplies them, but those of experts. None:
    in ``dtype``."""

    @property
    def is_fp8(self) -> bool:
        return self.scaled_product is not None

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
    """Where ``tensors`` puts them. ``on_layer`` is called when a layer is there. Raises
    CheckpointError as DecoderTensors does, RuntimeError (torch.OutOfMemoryError on a GPU) where
    there is no room."""
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
    norms, mlp, experts = spec.norms, spec.layers[i].mlp, spec.layers[i].experts

    def linear(rows: LinearRows) -> DeviceLinear:
        return form.linear(rows.weight, rows.bias)

    return DeviceLayer(
        before_attention=tensors.norm(i, norms.before_attention),
        after_attention=tensors.norm(i, norms.after_attention),
        before_mlp=tensors.norm(i, norms.before_mlp),
        after_mlp=tensors.norm(i, norms.after_mlp),
        q_norm=tensors.q_norm(i),
        k_norm=tensors.k_norm(i),
        qkv=linear(tensors.qkv(i)),
        output=linear(tensors.output(i)),
        mlp=None if mlp is None else _mlp(tensors, form, tensors.mlp_name(i), mlp),
        experts=None if experts is None else _experts(tensors, spec, experts, form, i),
    )


def _mlp(tensors: DecoderTensors, form: WeightFormat, name: str, mlp: MlpSpec) -> DeviceMlp:
    if mlp.is_gated:
        both = tensors.gate_up(name, mlp)
        bias = None if both.biases is None else torch.cat(both.biases)
        up = form.linear(torch.cat((both.gate, both.up)), bias)
    else:
        rows = tensors.up(name, mlp)
        up = form.linear(rows.weight, rows.bias)
    down = tensors.down(name, mlp)
    return DeviceMlp(up=up, down=form.linear(down.weight, down.bias))


def _experts(
    tensors: DecoderTensors,
    spec: DecoderSpec,
    experts: ExpertsSpec,
    form: WeightFormat,
    i: int,
) -> DeviceExperts:
    """Each expert goes into its place as it is read, so nothing lies there twice."""
    router = tensors.router(i).to(form.dtype)
    n, k = experts.mlp.intermediate_size, spec.hidden_size
    gate_ups = _ExpertRows(router, (experts.num_experts, 2 * n, k), form)
    downs = _ExpertRows(router, (experts.num_experts, k, n), form)
    for expert in range(experts.num_experts):
        name = tensors.expert_name(i, expert)
        both = tensors.gate_up(name, experts.mlp)
        gate_ups.put(expert, slice(0, n), both.gate)
        gate_ups.put(expert, slice(n, 2 * n), both.up)
        downs.put(expert, slice(0, k), tensors.down(name, experts.mlp).weight)
    return DeviceExperts(
        router=DenseLinear(router, None),
        tensors=ExpertTensors(
            gate_ups=gate_ups.numbers,
            downs=downs.numbers,
            gate_up_scales=gate_ups.scales,
            down_scales=downs.scales,
        ),
    )


class _ExpertRows:
    """One linear of every expert, [E, n, k], being filled."""

    def __init__(self, like: Tensor, shape: tuple[int, int, int], form: WeightFormat) -> None:
        """``like``: of the activations' dtype, on the device."""
        self.numbers = like.new_empty(shape, dtype=FP8_DTYPE if form.is_fp8 else form.dtype)
        self.scales = like.new_empty(shape[:2], dtype=torch.float32) if form.is_fp8 else None
        self._dtype = form.dtype

    def put(self, expert: int, rows: slice, weight: Tensor) -> None:
        if self.scales is None:
            self.numbers[expert, rows] = weight
            return
        numbers, scales = quantize_rows(weight.to(self._dtype))
        self.numbers[expert, rows] = numbers
        self.scales[expert, rows] = scales.squeeze(-1)
