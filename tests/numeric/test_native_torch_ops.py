"""The custom ops: torch's own checks of schema and fake kernels, and the library's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.native.elementwise import NativeElementwise
from inflight.native.library import NativeLibrary
from inflight.native.linear import NativeLinear
from inflight.native.packed import WEIGHT_KINDS, WeightKind, pack_gate_up, pack_linear
from inflight.native.torch_ops import register_torch_ops
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    library = native_library()
    register_torch_ops(library)
    register_torch_ops(library)  # the second time changes nothing
    return library


def random_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_ops_are_the_library(library: NativeLibrary, kind: WeightKind) -> None:
    x = random_of(2, 3, 64)
    plain = pack_linear(random_of(70, 64), random_of(70), kind)
    both = pack_gate_up(random_of(70, 64), random_of(70, 64) / 2, kind)
    y, product = torch.empty(2, 3, 70), torch.empty(2, 3, 70)
    NativeLinear(library)(x, plain, y)
    NativeLinear(library).gate_up(x, both, product, "silu")
    ops = torch.ops.inflight
    assert torch.equal(ops.linear(x, plain.data, plain.bias, kind, 70), y)
    assert torch.equal(ops.gate_up(x, both.data, None, kind, 70, "silu"), product)
    assert torch.equal(ops.argmax(x, plain.data, plain.bias, kind, 70), y.argmax(-1).int())
    added = random_of(2, 3, 70)
    expected = added.clone()
    NativeLinear(library)(x, plain, expected, accumulate=True)
    assert ops.add_linear(added, x, plain.data, plain.bias, kind, 70) is None
    assert torch.equal(added, expected)
    # What is not contiguous is copied, not misread.
    turned = x.transpose(0, 1)
    turned_y = ops.linear(turned, plain.data, plain.bias, kind, 70)
    assert torch.equal(turned_y, y.transpose(0, 1))
    turned_ids = ops.argmax(turned, plain.data, plain.bias, kind, 70)
    assert torch.equal(turned_ids, y.transpose(0, 1).argmax(-1).int())


def test_a_compiled_residual_is_added_to(library: NativeLibrary) -> None:
    """A mutation that torch must not lose, and the norm behind it."""
    packed = pack_linear(random_of(64, 64), None, "f32")
    x, weight = random_of(3, 64), random_of(64)

    def block(residual: Tensor) -> Tensor:
        torch.ops.inflight.add_linear(residual, x, packed.data, None, "f32", 64)
        normed: Tensor = torch.ops.inflight.rms_norm(residual, weight, 1e-5)
        return normed

    ours, theirs = random_of(3, 64), random_of(3, 64)
    expected = block(ours)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(theirs), expected)
    assert torch.equal(theirs, ours)


def test_rms_norm_is_the_library(library: NativeLibrary) -> None:
    x, weight, out = random_of(2, 3, 64), random_of(64), torch.empty(6, 64)
    NativeElementwise(library).rms_norm(x.view(6, 64), weight, 1e-5, out)
    assert torch.equal(torch.ops.inflight.rms_norm(x, weight, 1e-5), out.view(2, 3, 64))


def test_torch_finds_nothing_wrong(library: NativeLibrary) -> None:
    packed = pack_linear(random_of(70, 64), random_of(70), "bf16")
    both = pack_gate_up(random_of(70, 64), random_of(70, 64), "bf16")
    x = random_of(3, 64).bfloat16()
    ops = torch.ops.inflight
    calls = (
        (ops.linear.default, (x, packed.data, packed.bias, "bf16", 70)),
        (ops.add_linear.default, (random_of(3, 70), x, packed.data, packed.bias, "bf16", 70)),
        (ops.argmax.default, (x, packed.data, packed.bias, "bf16", 70)),
        (ops.argmax.default, (x.view(3, 1, 64), packed.data, None, "bf16", 70)),
        (ops.gate_up.default, (x, both.data, None, "bf16", 70, "gelu_tanh")),
        (ops.rms_norm.default, (random_of(3, 64), random_of(64), 1e-6)),
    )
    for op, arguments in calls:
        results = torch.library.opcheck(op, arguments)
        assert set(results.values()) == {"SUCCESS"}, (op, results)


def test_sizes_that_do_not_fit_are_refused(library: NativeLibrary) -> None:
    packed = pack_linear(random_of(70, 64), None, "bf16")
    with pytest.raises(CheckpointError, match="packed weights bf16 of 70 x 128"):
        torch.ops.inflight.linear(random_of(3, 128), packed.data, None, "bf16", 70)
    with pytest.raises(CheckpointError, match="packed weights bf16 of 70 x 128"):
        torch.ops.inflight.argmax(random_of(3, 128), packed.data, None, "bf16", 70)


def test_dtypes_and_widths_that_do_not_fit_are_refused(library: NativeLibrary) -> None:
    packed = pack_linear(random_of(70, 64), None, "bf16")
    ops = torch.ops.inflight
    with pytest.raises(ValueError, match="float16"):
        ops.linear(random_of(3, 64).half(), packed.data, None, "bf16", 70)
    with pytest.raises(ValueError, match="float16"):
        ops.argmax(random_of(3, 64).half(), packed.data, None, "bf16", 70)
    with pytest.raises(ValueError, match="bfloat16"):
        ops.add_linear(random_of(3, 70).bfloat16(), random_of(3, 64), packed.data, None, "bf16", 70)
    for residual in (random_of(2, 70), random_of(70, 3).T):
        with pytest.raises(ValueError, match=r"residual has to be contiguous \[3, 70\]"):
            ops.add_linear(residual, random_of(3, 64), packed.data, None, "bf16", 70)
    with pytest.raises(ValueError, match="bfloat16"):
        ops.rms_norm(random_of(3, 64).bfloat16(), random_of(64), 1e-5)
    with pytest.raises(ValueError, match="rows of 40"):
        ops.rms_norm(random_of(3, 40), random_of(40), 1e-5)
