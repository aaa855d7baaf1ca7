"""NativeLinear against float64, for every kind of weights and every instruction set of the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.native import linear
from inflight.native.library import Isa, NativeLibrary, load_native
from inflight.native.linear import Activation, LinearOps, NativeLinear, TorchLinear
from inflight.native.packed import (
    WEIGHT_KINDS,
    PackedLinear,
    WeightKind,
    pack_gate_up,
    pack_linear,
)

pytestmark = pytest.mark.numeric

# One row; blocks of registers that come out even and odd; tiles of 16 and 32, full and not.
ROWS = [1, 2, 7, 12, 16, 33, 49, 100]
# n, k: one panel; columns and steps along k that are padded; several panels.
SHAPES = [(32, 32), (70, 96), (33, 80), (160, 576)]
GUARD = 12345.0
EXPANDED_FROM = {"q8_0": 32, "q4_0": 11, "q4_1": 11}
"""Rows from which AMX takes quantized weights expanded to bf16."""


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    library = load_native("", every_isa=True)
    if library is None:
        pytest.skip("no C++ compiler")
    return library


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[Isa]:
    if request.param > library.best_isa:
        pytest.skip(f"this CPU has no {request.param.name}")
    with library.limited_to(request.param):
        yield request.param


@pytest.fixture
def ops(library: NativeLibrary) -> NativeLinear:
    return NativeLinear(library)


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_of(n: int, k: int, kind: WeightKind) -> PackedLinear:
    return pack_linear(random_of(n, k, seed=1) / math.sqrt(k), random_of(n, seed=2), kind)


def in_groups_of_8_bits(x: Tensor, isa: Isa) -> Tensor:
    """What x is after each group of 32 was rounded to 127 steps either way, as float64.

    In the arithmetic of the kernels, since a quotient may fall in the middle between two steps:
    with a fused multiply-add it is rounded to a step at once, without to float32 first.
    """
    padded = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scale = padded.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    fused = isa >= Isa.AVX2
    steps = (padded.double() * inverse if fused else padded * inverse).round()
    return (steps.double() * scale).flatten(1)[:, : x.shape[1]]


def bf16_half_away(value: Tensor) -> Tensor:
    """Rounded to the nearest bf16 and from the middle between two to the larger magnitude."""
    bits = value.float().view(torch.int32)
    return ((bits + 0x8000) & -0x10000).view(torch.float32).double()


def bf16(value: Tensor) -> Tensor:
    return value.bfloat16().double()


def exact(x: Tensor, packed: PackedLinear, isa: Isa) -> Tensor:
    """The product in float64 of what the kernels multiply: rows and weights as they round them."""
    weight, bias = packed.unpack(), packed.unpack_bias()
    x = x.float()
    if packed.kind == "f32":
        y = x.double() @ weight.double().T
    elif packed.kind == "bf16":
        y = (bf16(x) if isa >= Isa.AVX512 else x.double()) @ weight.double().T
    elif isa == Isa.AMX and len(x) >= EXPANDED_FROM[packed.kind]:
        y = bf16(x) @ bf16_half_away(weight).T
    else:
        y = in_groups_of_8_bits(x, isa) @ weight.double().T
    return y if bias is None else y + bias.double()


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


TOLERANCE = 1e-5
"""Of fp32 sums. A weight of q4_1 may round to bf16 the other way once in a long while."""


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


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_rows_do_not_depend_on_threads_or_chunks(
    library: NativeLibrary, ops: NativeLinear, isa: Isa, kind: WeightKind
) -> None:
    """1100 rows go in several chunks; whoever computes them, the results are the same bits."""
    before = torch.get_num_threads()
    packed = packed_of(70, 96, kind)
    x = random_of(1100, 96)
    results = []
    try:
        for num_threads in (1, 2, 5):
            library.set_num_threads(num_threads)
            results.append(torch.full((1100, 70), GUARD))
            ops(x, packed, results[-1])
    finally:
        library.set_num_threads(before)
    assert relative_error(results[0], exact(x, packed, isa)) < TOLERANCE
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_a_row_of_8_bits_is_the_same_in_any_company(
    ops: NativeLinear, isa: Isa, kind: WeightKind
) -> None:
    """With AMX as long as the company is small."""
    packed, x = packed_of(70, 96, kind), random_of(48, 96)
    alone = torch.empty(48, 70)
    for row in range(48):
        ops(x[row : row + 1], packed, alone[row : row + 1])
    for rows in (2, 6, 7, 10, 11, 16, 17, 31, 48):
        if isa == Isa.AMX and rows >= EXPANDED_FROM[kind]:
            continue
        y = torch.empty(rows, 70)
        ops(x[:rows], packed, y)
        assert torch.equal(y, alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_a_row_in_tiles_is_the_same_in_any_company(
    ops: NativeLinear, isa: Isa, kind: WeightKind
) -> None:
    """The first block of rows expands a panel while it computes, further ones find it expanded."""
    if isa != Isa.AMX:
        pytest.skip("only AMX has tiles")
    packed, x = packed_of(70, 160, kind), random_of(150, 160)
    largest = torch.empty(150, 70)
    ops(x, packed, largest)
    for rows in (EXPANDED_FROM[kind], 32, 33, 48, 65, 100):
        y = torch.empty(rows, 70)
        ops(x[-rows:], packed, y)
        assert torch.equal(y, largest[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_two_python_threads_at_once(ops: NativeLinear, kind: WeightKind) -> None:
    packed = packed_of(160, 80, kind)
    inputs = [random_of(rows, 80, seed=rows) for rows in (1, 21, 60, 3)]

    def product(x: Tensor) -> Tensor:
        y = torch.empty(len(x), 160)
        for _ in range(50):
            ops(x, packed, y)
        return y

    alone = [product(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(product, inputs))
    for expected, y in zip(alone, together, strict=True):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_its_own_row_alone(
    ops: NativeLinear, isa: Isa, kind: WeightKind, bad: float
) -> None:
    packed = packed_of(64, 64, kind)
    for rows in (3, 40):
        x, y = random_of(rows, 64), torch.empty(rows, 64)
        x[1, 50] = bad
        ops(x, packed, y)
        assert not y[1].isfinite().any()
        assert y[0].isfinite().all() and y[2:].isfinite().all()


def test_extreme_quantized_weights(ops: NativeLinear, isa: Isa) -> None:
    """Largest magnitudes and one sign throughout: sums of products that would overflow 16 bits."""
    for sign_of_weights in (1.0, -1.0):
        packed = pack_linear(torch.full((32, 64), sign_of_weights), None, "q8_0")
        for x in (torch.ones(2, 64), -torch.ones(2, 64)):
            y = torch.empty(2, 32)
            ops(x, packed, y)
            assert torch.allclose(y, 64 * sign_of_weights * x[:, :32], rtol=1e-3)


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
