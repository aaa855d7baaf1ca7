"""The operations between the linears, native and in torch, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inflight.native.elementwise import (
    Activation,
    Elementwise,
    NativeElementwise,
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_delta", [False, True])
def test_rms_norm(
    ops: Elementwise, shape: tuple[int, int], dtype: torch.dtype, with_delta: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(shape, generator=generator) * 3
    delta = torch.randn(shape, generator=generator) if with_delta else None
    weight = torch.randn(shape[1], generator=generator)
    out = torch.full(shape, torch.nan, dtype=dtype)
    total = residual.double() + (0.0 if delta is None else delta.double())
    untouched = residual.clone()
    ops.rms_norm(residual, weight, 1e-2, out, delta=delta, weight_offset=1.0)
    norm = total / (total.square().mean(-1, keepdim=True) + 1e-2).sqrt() * (weight.double() + 1)
    check(out, norm)
    check(residual, total)
    assert with_delta or torch.equal(residual, untouched)


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
