"""NativeLinear against float64, for every kind of weights and every instruction set of the CPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native import linear
from inflight.native.library import Isa, NativeLibrary
from inflight.native.linear import Activation, LinearOps, NativeLinear, TorchLinear
from inflight.native.packed import (
    WEIGHT_KINDS,
    WeightKind,
    pack_gate_up,
    pack_linear,
)
from tests.numeric.linear_cases import (
    GUARD,
    TOLERANCE,
    exact,
    packed_of,
    random_of,
    relative_error,
)

pytestmark = pytest.mark.numeric

# One row; blocks of registers that come out even and odd; tiles of 16 and 32, full and not.
ROWS = [1, 2, 7, 12, 16, 33, 49, 100]
# n, k: one panel; columns and steps along k that are padded; several panels.
SHAPES = [(32, 32), (70, 96), (33, 80), (160, 576)]


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product(ops: NativeLinear, isa: Isa, kind: WeightKind, n: int, k: int) -> None:
    packed = packed_of(n, k, kind)
    for rows in ROWS:
        x = random_of(rows, k, seed=rows)
        guarded = torch.full((rows + 2, n), GUARD)
        ops(x, packed, guarded[1:-1])
        error = relative_error(guarded[1:-1], exact(x, packed, isa))
        assert error < TOLERANCE, f"{rows} rows"
        assert (guarded[[0, -1]] == GUARD).all(), "wrote outside of y"


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("rows", [3, 40])
def test_dtypes_of_rows_and_results(
    ops: NativeLinear, isa: Isa, kind: WeightKind, rows: int
) -> None:
    packed = packed_of(70, 80, kind)
    for x in (random_of(rows, 80), random_of(rows, 80).bfloat16()):
        single, half = torch.empty(rows, 70), torch.empty(rows, 70, dtype=torch.bfloat16)
        ops(x, packed, single)
        ops(x, packed, half)
        assert relative_error(single, exact(x, packed, isa)) < TOLERANCE
        assert torch.equal(half, single.bfloat16())


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("rows", [1, 40])
def test_accumulate_adds_to_what_is_there(
    ops: NativeLinear, isa: Isa, kind: WeightKind, rows: int
) -> None:
    packed = packed_of(70, 96, kind)
    x, residual = random_of(rows, 96), random_of(rows, 70, seed=9)
    product, total = torch.empty(rows, 70), residual.clone()
    ops(x, packed, product)
    ops(x, packed, total, accumulate=True)
    assert torch.equal(total, product + residual)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up(ops: NativeLinear, isa: Isa, kind: WeightKind, activation: Activation) -> None:
    n, k = 70, 96
    gate, up = random_of(n, k, seed=1) / math.sqrt(k), random_of(n, k, seed=2) / math.sqrt(k)
    packed = pack_gate_up(gate, up, kind, (random_of(n, seed=3), random_of(n, seed=4)))
    for rows in (1, 5, 49):
        x = 3 * random_of(rows, k, seed=rows)
        y, rounded = torch.empty(rows, n), torch.empty(rows, n, dtype=torch.bfloat16)
        ops.gate_up(x, packed, y, activation)
        ops.gate_up(x, packed, rounded, activation)
        of_gate, of_up = exact(x, packed, isa).chunk(2, dim=1)
        active = F.silu(of_gate) if activation == "silu" else F.gelu(of_gate, approximate="tanh")
        assert relative_error(y, active * of_up) < TOLERANCE
        assert torch.equal(rounded, y.bfloat16())


def test_activations_at_the_ends_of_their_range(ops: NativeLinear, isa: Isa) -> None:
    values = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0])
    gate = torch.zeros(len(values), 32)
    gate[:, 0] = values
    up = torch.zeros(len(values), 32)
    up[:, 1] = 1.0
    packed = pack_gate_up(gate, up, "f32")
    for activation, expected in (
        ("silu", F.silu(values)),
        ("gelu_tanh", F.gelu(values.clamp(-1e9, 1e9), approximate="tanh")),
    ):
        y = torch.empty(1, len(values))
        ops.gate_up(torch.ones(1, 32), packed, y, activation)  # type: ignore[arg-type]
        assert torch.allclose(y[0, 1:], expected[1:], rtol=1e-5, atol=1e-30), activation
        assert y[0, 0].abs() < 1, activation


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_argmax_is_that_of_the_logits(
    ops: NativeLinear, isa: Isa, kind: WeightKind, rows: int
) -> None:
    packed = packed_of(997, 64, kind)
    x, logits = random_of(rows, 64, seed=rows), torch.empty(rows, 997)
    ops.logits(x, packed, logits)
    ids = ops.argmax(x, packed)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, logits.argmax(-1).int())


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_lowest_of_equal_logits_wins(
    library: NativeLibrary, ops: NativeLinear, isa: Isa, num_threads: int
) -> None:
    """Whichever thread meets it: the same row stands at both ends of the vocabulary."""
    before = torch.get_num_threads()
    weight = random_of(3200, 64, seed=1)
    weight[[37, 41, 1600, 3199]] = weight.abs().sum() * torch.ones(64) / 64
    packed = pack_linear(weight, None, "f32")
    try:
        library.set_num_threads(num_threads)
        for _ in range(20):
            assert ops.argmax(torch.ones(2, 64), packed).tolist() == [37, 37]
            assert ops.argmax(torch.full((1, 64), float("nan")), packed).tolist() == [0]
    finally:
        library.set_num_threads(before)


def test_no_rows(ops: NativeLinear, isa: Isa) -> None:
    packed = packed_of(64, 64, "bf16")
    y = torch.empty(0, 64)
    ops(torch.empty(0, 64), packed, y)
    ops.logits(torch.empty(0, 64), packed, y)
    assert ops.argmax(torch.empty(0, 64), packed).shape == (0,)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_torch_computes_the_same(ops: NativeLinear, kind: WeightKind) -> None:
    """Both implementations, through all methods, within what their roundings allow."""
    plain = packed_of(70, 96, kind)
    gate, up = random_of(70, 96, seed=5) / 10, random_of(70, 96, seed=6) / 10
    both = pack_gate_up(gate, up, kind)
    x = random_of(5, 96)

    def results_of(linear: LinearOps) -> list[Tensor]:
        stored, added, product = torch.empty(5, 70), torch.ones(5, 70), torch.empty(5, 70)
        linear(x, plain, stored)
        linear(x, plain, added, accumulate=True)
        linear.gate_up(x, both, product, "gelu_tanh")
        logits = torch.empty(5, 70)
        linear.logits(x, plain, logits)
        assert torch.equal(linear.argmax(x, plain), logits.argmax(-1).int())
        return [stored, added, product, logits]

    for ours, theirs in zip(results_of(ops), results_of(TorchLinear()), strict=True):
        assert relative_error(ours, theirs.double()) < (1e-6 if kind == "f32" else 1.5e-2)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, kind: WeightKind) -> None:
    """Of 70 columns and two pieces, the second of them narrow; with biases, and of both halves."""
    weight, bias = random_of(70, 96, seed=5) / 10, random_of(70, 1, seed=7)[:, 0]
    plain = pack_linear(weight, bias, kind)
    both = pack_gate_up(weight, random_of(70, 96, seed=6) / 10, kind, (bias, 2 * bias))
    for packed in (plain, both):
        pieces = list(packed.pieces(64))
        assert [piece.n for piece in pieces] == [64, 6]
        assert pieces[0].data.data_ptr() == packed.data.data_ptr(), "no copy"
        num_halves = 2 if packed.is_gate_up else 1
        for whole, parts in (
            (packed.unpack(), [piece.unpack() for piece in pieces]),
            (packed.unpack_bias(), [piece.unpack_bias() for piece in pieces]),
        ):
            assert whole is not None
            halves = [part.chunk(num_halves) for part in parts if part is not None]
            again = torch.cat([of[half] for half in range(num_halves) for of in halves])
            assert torch.equal(again, whole)
    monkeypatch.setattr(linear, "PIECE_COLUMNS", 64)
    x, ours, theirs = random_of(5, 96), torch.empty(5, 70), torch.empty(5, 70)
    keeping, forgetting = TorchLinear(), TorchLinear(keeps_unpacked=False)
    keeping(x, plain, theirs)
    forgetting(x, plain, ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    keeping.gate_up(x, both, theirs, "silu")
    forgetting.gate_up(x, both, ours, "silu")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
