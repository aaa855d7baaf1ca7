"""The operations between the linears, native and in torch, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native.elementwise import (
    Activation,
    Elementwise,
    NativeElementwise,
    PlainActivation,
    TorchElementwise,
    rope_table,
)
from inflight.native.library import Isa
from tests.numeric.native_library import library_limited_to

pytestmark = pytest.mark.numeric

# One row; several; enough rows and columns for a team of threads, unevenly.
SHAPES = [(1, 16), (5, 48), (37, 1040)]


@pytest.fixture(params=["torch", *(isa.name.lower() for isa in Isa)])
def ops(request: pytest.FixtureRequest) -> Iterator[Elementwise]:
    if request.param == "torch":
        yield TorchElementwise()
        return
    isa = Isa[request.param.upper()]
    library = library_limited_to(isa)
    with library.limited_to(isa):
        yield NativeElementwise(library)


def check(got: Tensor, expected: Tensor) -> None:
    """Relative to the size of the values: 2^-8 is what one rounding to bf16 may cost."""
    tolerance = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["fp32", "bf16", "added"])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norms(ops: Elementwise, shape: tuple[int, int], target: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 3 + 1
    weight, bias = torch.randn((2, shape[1]), generator=generator)
    dtype, accumulate = torch.bfloat16 if target == "bf16" else torch.float32, target == "added"
    before = torch.randn(shape, generator=generator) if accumulate else torch.tensor(torch.nan)
    out, untouched = before.to(dtype).expand(shape).clone(), x.clone()
    centered = x.double()
    if kind == "rms":
        ops.rms_norm(x, weight, 1e-2, out, accumulate=accumulate)
    else:
        own_bias = bias if kind == "layer with bias" else None
        ops.layer_norm(x, weight, own_bias, 1e-2, out, accumulate=accumulate)
        centered -= centered.mean(-1, keepdim=True)
    norm = centered / (centered.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    if kind == "layer with bias":
        norm += bias.double()
    check(out, norm + before.double() if accumulate else norm)
    assert torch.equal(x, untouched)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_copy(ops: Elementwise, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, out = torch.randn(shape), torch.empty(shape, dtype=dtype)
    ops.copy(x, out)
    assert torch.equal(out, x.to(dtype))


PLAIN: dict[PlainActivation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_plain_activations(
    ops: Elementwise, shape: tuple[int, int], activation: PlainActivation, dtype: torch.dtype
) -> None:
    data = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    data[0, :5] = torch.tensor([-200.0, 200.0, 0.0, -0.0, torch.nan])
    expected = PLAIN[activation](data.double())
    ops.activate(data, activation)
    assert data[0, 4].isnan(), "a broken row shows as broken"
    torch.testing.assert_close(
        data.double(),
        expected,
        rtol=2.0**-8 if dtype is torch.bfloat16 else 2e-6,
        atol=2.0**-8 if dtype is torch.bfloat16 else 2e-6,
        equal_nan=True,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("in_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gated_product(
    ops: Elementwise,
    shape: tuple[int, int],
    activation: Activation,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    rows, width = shape
    generator = torch.Generator().manual_seed(2)
    gate_up = (torch.randn((rows, 2 * width), generator=generator) * 4).to(in_dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -20.0])
    out = torch.empty(shape, dtype=out_dtype)
    ops.gated_product(gate_up, out, activation)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation is Activation.SILU:
        check(out, gate * torch.sigmoid(gate) * up)
    else:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        check(out, 0.5 * gate * (1 + torch.tanh(inner)) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embed(ops: Elementwise, dtype: torch.dtype) -> None:
    table = torch.randn(11, 48).to(dtype)
    ids = torch.tensor([10, 0, 3, 3])
    out = torch.empty(4, 48)
    ops.embed(table, ids, out, scale=2.5)
    assert torch.equal(out, table[ids].float() * 2.5)


@pytest.mark.parametrize("bad", [-1, 11, 1 << 40])
def test_an_id_outside_the_table_is_an_error(ops: Elementwise, bad: int) -> None:
    out = torch.zeros(3, 16)
    with pytest.raises(IndexError, match="not below 11"):
        ops.embed(torch.ones(11, 16), torch.tensor([0, bad, 1]), out)
    assert not out.any()


def test_nan_and_infinity_stay_what_they_are(ops: Elementwise) -> None:
    """A broken row shows as broken, and its neighbours do not notice."""
    residual = torch.ones(3, 32)
    residual[1, 5] = torch.nan
    out = torch.empty(3, 32, dtype=torch.bfloat16)
    ops.rms_norm(residual, torch.ones(32), 1e-6, out)
    assert out[1].isnan().all() and (out[[0, 2]] == 1).all()
    gate_up = torch.full((1, 32), 1.0)
    gate_up[0, 16] = torch.inf
    product = torch.empty(1, 16)
    ops.gated_product(gate_up, product, Activation.SILU)
    assert product[0, 0] == torch.inf and product[0, 1:].isfinite().all()


def test_rope_table() -> None:
    table = rope_table(torch.tensor([1.0, 0.25]), 5, attention_scaling=2.0)
    assert table.shape == (5, 4) and table.is_contiguous() and table.dtype == torch.float32
    angles = torch.tensor([4.0, 1.0])
    torch.testing.assert_close(table[4], 2 * torch.cat((angles.cos(), angles.sin())))
