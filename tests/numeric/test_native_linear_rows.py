"""A row of NativeLinear comes to the same in any company, also at the ends of the numbers."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from torch import Tensor

from inflight.native.gguf_blocks import BLOCK_FORMATS, GgufBlocks, QuantizedKind
from inflight.native.library import Isa, NativeLibrary
from inflight.native.linear import NativeLinear
from inflight.native.packed import (
    WEIGHT_KINDS,
    WeightKind,
    pack_blocks,
    pack_gate_up,
    pack_linear,
)
from tests.numeric.linear_cases import (
    EXPANDED_FROM,
    GUARD,
    TOLERANCE,
    exact,
    packed_of,
    random_of,
    relative_error,
)

pytestmark = pytest.mark.numeric


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
    for rows in (2, 4, 5, 6, 7, 10, 11, 16, 17, 31, 48):
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


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("k", [56, 64, 96, 128, 160, 264])
def test_a_row_of_floats_is_the_same_in_any_company(
    ops: NativeLinear, isa: Isa, kind: WeightKind, k: int
) -> None:
    """Whatever blocks of rows and slices along k it is computed in; ``k`` about their ends."""
    packed, x = packed_of(70, k, kind), random_of(52, k)
    alone = torch.empty(52, 70)
    for row in range(52):
        ops(x[row : row + 1], packed, alone[row : row + 1])
    assert relative_error(alone, exact(x, packed, isa)) < TOLERANCE
    for rows in (*range(2, 14), 47, 48, 49, 52):
        y = torch.full((rows + 1, 70), GUARD)
        ops(x[:rows], packed, y[:rows])
        assert torch.equal(y[:rows], alone[:rows]), f"{rows} rows"
        assert (y[rows] == GUARD).all()


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [100, 128, 250, 1100])
def test_a_row_alone_meets_panels_at_once(
    library: NativeLibrary, ops: NativeLinear, kind: WeightKind, num_threads: int, n: int
) -> None:
    """Several panels, and those that are left over one by one: the bits are those of company."""
    before = torch.get_num_threads()
    plain, x = packed_of(n, 150, kind), random_of(2, 150)
    gate, up = random_of(n, 150, seed=3) / 12, random_of(n, 150, seed=4) / 12
    both = pack_gate_up(gate, up, kind)
    together, alone, added = torch.empty(2, n), torch.full((2, n), GUARD), torch.ones(2, n)
    products, product = torch.empty(2, n), torch.full((2, n), GUARD)
    try:
        library.set_num_threads(num_threads)
        ops(x, plain, together)
        ops(x[:1], plain, alone[:1])
        ops(x[:1], plain, added[:1], accumulate=True)
        ops.gate_up(x, both, products, "silu")
        ops.gate_up(x[:1], both, product[:1], "silu")
        likeliest = ops.argmax(x[:1], plain)
    finally:
        library.set_num_threads(before)
    for ours, expected in ((alone, together), (added, together + 1), (product, products)):
        assert torch.equal(ours[0], expected[0])
        assert torch.equal(ours[1], ours[1, :1].expand(n)), "the row behind is not touched"
    assert likeliest.tolist() == [int(together[0].argmax())]


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


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_no_sum_of_whole_numbers_overflows(
    ops: NativeLinear, isa: Isa, kind: QuantizedKind, rows: int
) -> None:
    """Bytes of one value throughout, and of two in turn: the ends of what each kind can hold.

    The scales are powers of two, so every result is a float32.
    """
    ends = [0x80, 0x81, 0x7F] if kind == "q8_0" else [0x00, 0xFF, 0xF0, 0x0F]
    patterns = list(itertools.product(ends, repeat=2))
    form = BLOCK_FORMATS[kind]
    header = torch.tensor([0.5, -2.0][: form.num_halves]).half().view(torch.uint8)
    values = torch.tensor(patterns, dtype=torch.uint8).repeat(1, form.value_bytes // 2)
    block = torch.cat((header.expand(len(patterns), -1), values), dim=1)
    blocks = GgufBlocks(kind, block[:, None].expand(-1, 3, -1).contiguous())
    packed = pack_blocks(blocks)
    for x in (torch.ones(96), torch.tensor([1.0, -1.0]).repeat(48)):
        for sign in (127.0, -127.0):
            y = torch.empty(rows, packed.n)
            ops((sign * x).repeat(rows, 1), packed, y)
            assert torch.equal(y, (sign * x @ packed.unpack().T).expand(rows, -1))
