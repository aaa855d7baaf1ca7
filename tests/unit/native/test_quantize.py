"""quantize and GgufBlocks, against ggml's own Python package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as ggml_dequantize
from gguf.quants import quantize as ggml_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.native.gguf_blocks import GgufBlocks, QuantizedKind, stack_rows
from inflight.native.quantize import quantize

KINDS: tuple[QuantizedKind, ...] = ("q8_0", "q4_0", "q4_1")
# Of a group's scale: q4_0 reaches one step less far on the side away from its largest magnitude.
LARGEST_ERROR = {"q8_0": 0.5, "q4_0": 1.0, "q4_1": 0.5}


def ggml_type(kind: QuantizedKind) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.upper()]


def weight_of(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def ggml_blocks(weight: Tensor, kind: QuantizedKind) -> GgufBlocks:
    data = ggml_quantize(weight.numpy(), ggml_type(kind))
    return GgufBlocks.from_bytes(data, kind, *weight.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_mean_what_ggml_means(kind: QuantizedKind) -> None:
    blocks = ggml_blocks(weight_of(24, 96), kind)
    theirs = ggml_dequantize(blocks.blocks.flatten(1).numpy(), ggml_type(kind))
    assert torch.equal(blocks.dequantize(), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_ours_are_blocks_that_ggml_reads(kind: QuantizedKind) -> None:
    blocks = quantize(weight_of(24, 96), kind)
    theirs = ggml_dequantize(blocks.blocks.flatten(1).numpy(), ggml_type(kind))
    assert torch.equal(blocks.dequantize(), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_ours_are_as_near_as_ggmls(kind: QuantizedKind) -> None:
    weight = weight_of(64, 512)
    ours = (quantize(weight, kind).dequantize() - weight).norm()
    theirs = (ggml_blocks(weight, kind).dequantize() - weight).norm()
    assert ours <= 1.001 * theirs


@pytest.mark.parametrize("kind", KINDS)
@given(exponent=st.integers(-6, 4), shift=st.floats(-3, 3), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_no_weight_moves_further_than_its_step(
    kind: QuantizedKind, exponent: int, shift: float, seed: int
) -> None:
    weight = (weight_of(3, 64, seed) + shift) * 10.0**exponent
    blocks = quantize(weight, kind)
    step = blocks.blocks[..., :2].contiguous().view(torch.float16).float().abs()
    error = (blocks.dequantize() - weight).view(3, 2, 32).abs()
    # Rounding the scale and the minimum to half precision adds to it: 2^-11 of them, or 2^-25.
    rounding = weight.abs().view(3, 2, 32).amax(-1, keepdim=True) * 2**-10 + 256 * 2**-25
    assert (error <= LARGEST_ERROR[kind] * step + rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quantized_already_is_kept(kind: QuantizedKind) -> None:
    """A checkpoint that somebody dequantized gets its own values back."""
    weight = quantize(weight_of(16, 256), kind).dequantize()
    again = quantize(weight, kind).dequantize()
    assert (again - weight).norm() <= 2e-4 * weight.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_special_groups(kind: QuantizedKind) -> None:
    zeros, same = torch.zeros(1, 32), torch.full((1, 32), 0.5)
    assert torch.equal(quantize(zeros, kind).dequantize(), zeros)
    assert torch.allclose(quantize(same, kind).dequantize(), same, rtol=1e-3)
    negative = torch.cat((torch.full((1, 31), -1.0), torch.full((1, 1), 0.25)), dim=1)
    error = (quantize(negative, kind).dequantize() - negative).abs().max()
    assert error <= LARGEST_ERROR[kind] * 2 / 15


@pytest.mark.parametrize("kind", KINDS)
def test_k_is_padded(kind: QuantizedKind) -> None:
    weight = weight_of(4, 40)
    blocks = quantize(weight, kind)
    assert blocks.k == 64
    assert not blocks.dequantize()[:, 40:].abs().gt(0.1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_large_weights_go_in_parts(kind: QuantizedKind) -> None:
    weight = weight_of(4096 + 5, 32)
    tail = quantize(weight[-5:], kind)
    assert torch.equal(quantize(weight, kind).blocks[-5:], tail.blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_no_scale_can_hold_is_refused(kind: QuantizedKind, bad: float) -> None:
    weight = weight_of(4, 64)
    weight[2, 40] = bad
    with pytest.raises(CheckpointError, match="not finite, or beyond fp16"):
        quantize(weight, kind)


def test_bytes_of_the_wrong_number_are_refused() -> None:
    data = np.zeros(34 * 4, dtype=np.uint8)
    assert GgufBlocks.from_bytes(data, "q8_0", 2, 64).blocks.shape == (2, 2, 34)
    for n, k in ((3, 64), (2, 63), (2, 96), (4, 33)):
        with pytest.raises(CheckpointError, match="no q8_0 weights"):
            GgufBlocks.from_bytes(data, "q8_0", n, k)


def test_rope_order_is_undone() -> None:
    """llama.cpp's converter swaps the two axes of a head; this swaps them back."""
    num_heads, head_dim = 3, 8
    original = quantize(weight_of(num_heads * head_dim, 32), "q4_1")
    halves = original.blocks.view(num_heads, 2, head_dim // 2, 1, -1)
    stored = GgufBlocks("q4_1", halves.transpose(1, 2).reshape(original.blocks.shape))
    assert not torch.equal(stored.blocks, original.blocks)
    assert torch.equal(stored.without_rope_order(num_heads).blocks, original.blocks)
    with pytest.raises(CheckpointError, match="24 rows are not 5 heads"):
        stored.without_rope_order(5)


def test_rows_are_stacked_when_they_match() -> None:
    first, second = quantize(weight_of(4, 32), "q8_0"), quantize(weight_of(2, 32, 1), "q8_0")
    stacked = stack_rows([first, second])
    assert torch.equal(stacked.dequantize()[4:], second.dequantize())
    for other in (quantize(weight_of(4, 32), "q4_0"), quantize(weight_of(4, 64), "q8_0")):
        with pytest.raises(CheckpointError, match="differ in kind or size"):
            stack_rows([first, other])
