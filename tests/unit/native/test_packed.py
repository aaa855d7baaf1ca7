"""PackedLinear: every weight lies where the kernels look for it, and comes back exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.native.gguf_blocks import GgufBlocks
from inflight.native.packed import (
    WEIGHT_KINDS,
    PackedLinear,
    WeightKind,
    pack_blocks,
    pack_gate_up,
    pack_gate_up_blocks,
    pack_linear,
    packed_bytes,
)
from inflight.native.quantize import quantize

SHAPES = [(32, 32), (96, 64), (33, 96), (70, 80), (1, 1)]


def weight_of(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, kind: WeightKind) -> Tensor:
    """What ``kind`` can hold of the weight."""
    if kind == "f32" or kind == "bf16":
        return weight.to(torch.bfloat16 if kind == "bf16" else torch.float32).float()
    return quantize(weight, kind).dequantize()[:, : weight.shape[1]]


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_and_bias_come_back(kind: WeightKind, n: int, k: int) -> None:
    weight, bias = weight_of(n, k), torch.arange(float(n))
    packed = pack_linear(weight, bias, kind)
    assert torch.equal(packed.unpack(), rounded(weight, kind))
    unpacked_bias = packed.unpack_bias()
    assert unpacked_bias is not None and torch.equal(unpacked_bias, bias)
    assert pack_linear(weight, None, kind).unpack_bias() is None


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gate_and_up_come_back_in_order(kind: WeightKind, n: int, k: int) -> None:
    gate, up = weight_of(n, k, 1), weight_of(n, k, 2)
    biases = (torch.arange(float(n)), -torch.arange(float(n)))
    packed = pack_gate_up(gate, up, kind, biases)
    expected = torch.cat((rounded(gate, kind), rounded(up, kind)))
    assert torch.equal(packed.unpack(), expected)
    unpacked_bias = packed.unpack_bias()
    assert unpacked_bias is not None and torch.equal(unpacked_bias, torch.cat(biases))


def test_gate_and_up_take_panels_in_turn() -> None:
    gate, up = torch.full((64, 32), 1.0), torch.full((64, 32), 2.0)
    panels = pack_gate_up(gate, up, "f32").data.view(torch.float32).view(4, -1)
    assert [panel.unique().tolist() for panel in panels] == [[1.0], [2.0], [1.0], [2.0]]


def test_f32_lies_by_column_in_panels() -> None:
    weight = weight_of(64, 96)
    data = pack_linear(weight, None, "f32").data.view(torch.float32).view(2, 96, 32)
    assert data[1, 17, 5] == weight[32 + 5, 17]


def test_bf16_lies_in_pairs_along_k() -> None:
    weight = weight_of(64, 96).bfloat16()
    data = pack_linear(weight, None, "bf16").data.view(torch.bfloat16).view(2, 48, 32, 2)
    assert data[1, 8, 5, 1] == weight[32 + 5, 17]


def test_q8_0_lies_in_fours_along_k() -> None:
    blocks = quantize(weight_of(64, 96), "q8_0")
    group = pack_blocks(blocks).data.view(2, 3, 1088)[1, 2]
    block = blocks.blocks[32 + 5, 2]
    assert group[:1024].view(8, 32, 4)[3, 5, 2] == block[2:][14]
    assert torch.equal(group[1024:].view(32, 2)[5], block[:2])


def test_q4_1_keeps_the_bytes_of_its_blocks() -> None:
    blocks = quantize(weight_of(64, 96), "q4_1")
    group = pack_blocks(blocks).data.view(2, 3, 640)[1, 2]
    block = blocks.blocks[32 + 5, 2]
    assert torch.equal(group[:512].view(4, 32, 4)[3, 5], block[4 + 12 :])
    assert torch.equal(group[512:576].view(32, 2)[5], block[:2])
    assert torch.equal(group[576:].view(32, 2)[5], block[2:4])


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_packing_blocks_or_their_floats_is_the_same(kind: WeightKind) -> None:
    weight = weight_of(64, 64)
    blocks = quantize(weight, kind)  # type: ignore[arg-type]
    assert torch.equal(pack_blocks(blocks).data, pack_linear(weight, None, kind).data)
    both = pack_gate_up_blocks(blocks, blocks)
    assert torch.equal(both.data, pack_gate_up(weight, weight, kind).data)


def test_a_gate_and_up_of_two_kinds_are_refused() -> None:
    gate, up = (quantize(weight_of(32, 32), kind) for kind in ("q8_0", "q4_0"))
    with pytest.raises(CheckpointError, match="a gate of q8_0 and an up projection of q4_0"):
        pack_gate_up_blocks(gate, up)


def remade(packed: PackedLinear, **changes: object) -> PackedLinear:
    names = ("kind", "n", "k", "is_gate_up", "data", "bias")
    return PackedLinear(**{**{name: getattr(packed, name) for name in names}, **changes})  # type: ignore[arg-type]


def test_data_of_another_size_is_refused() -> None:
    packed = pack_linear(weight_of(64, 64), torch.zeros(64), "bf16")
    assert torch.equal(remade(packed).unpack(), packed.unpack())
    for changes in (
        {"data": packed.data[:-1]},
        {"data": packed.data.view(torch.int8)},
        {"n": 65},
        {"k": 65},
        {"n": 0, "data": packed.data[:0]},
        {"k": 0, "data": packed.data[:0]},
        {"kind": "f32"},
        {"is_gate_up": True},
        {"bias": torch.zeros(32)},
        {"bias": torch.zeros(64, dtype=torch.float64)},
    ):
        with pytest.raises(CheckpointError, match=r"packed weights|packed bias"):
            remade(packed, **changes)


def test_sizes() -> None:
    values = 64 * 64
    assert packed_bytes("f32", 33, 33, is_gate_up=False) == 4 * values
    assert packed_bytes("bf16", 33, 33, is_gate_up=False) == 2 * values
    assert packed_bytes("q8_0", 33, 33, is_gate_up=False) == values * 34 // 32
    assert packed_bytes("q4_0", 33, 33, is_gate_up=True) == 2 * values * 18 // 32
    assert packed_bytes("q4_1", 33, 33, is_gate_up=True) == 2 * values * 20 // 32


def test_blocks_of_no_rows_left_over() -> None:
    blocks = quantize(weight_of(33, 32), "q4_0")
    padding = pack_blocks(blocks).data.view(2, -1)[1]
    scales = padding[512:].view(torch.float16)
    assert scales[0] != 0 and not scales[1:].any(), "padded columns must give 0"
    assert isinstance(blocks, GgufBlocks)
