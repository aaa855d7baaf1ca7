"""The thread team where the process is forked, or has more members than cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inflight.native.library import NativeLibrary, load_native
from inflight.native.linear import NativeLinear
from inflight.native.packed import PackedLinear, pack_linear

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    library = load_native("")
    if library is None:
        pytest.skip("no C++ compiler")
    return library


@pytest.fixture
def ops(library: NativeLibrary) -> Iterator[NativeLinear]:
    before = torch.get_num_threads()
    yield NativeLinear(library)
    library.set_num_threads(before)


def inputs() -> tuple[Tensor, PackedLinear]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1600, 96, generator=generator)
    return torch.randn(40, 96, generator=generator), pack_linear(weight, None, "bf16")


def product(ops: NativeLinear, x: Tensor, packed: PackedLinear) -> Tensor:
    y = torch.zeros(len(x), packed.n)
    ops(x, packed, y)
    return y


def product_in_a_child(ops: NativeLinear, x: Tensor, packed: PackedLinear) -> Tensor:
    """What the child of a fork computes, by way of memory that both share."""
    y = torch.zeros(len(x), packed.n).share_memory_()
    child = os.fork()
    if child == 0:
        try:
            ops(x, packed, y)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return y


def test_any_size_computes_the_same(library: NativeLibrary, ops: NativeLinear) -> None:
    x, packed = inputs()
    library.set_num_threads(1)
    expected = product(ops, x, packed)
    assert expected.count_nonzero()
    for num_threads in (2, 7, 3, 1, 2):
        library.set_num_threads(num_threads)
        for _ in range(20):
            assert torch.equal(product(ops, x, packed), expected), f"{num_threads} threads"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_team_of_its_own(library: NativeLibrary, ops: NativeLinear) -> None:
    x, packed = inputs()
    library.set_num_threads(3)
    expected = product(ops, x, packed)  # the helpers are there, and wait
    assert torch.equal(product_in_a_child(ops, x, packed), expected)
    assert torch.equal(product(ops, x, packed), expected)
