"""Dataclasses of the shapes that weights have, small."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from inflight.engine_files.key import EngineKey


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    router: Tensor
    members: tuple[Dense, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    table: Tensor
    layers: tuple[Dense | Experts, ...]
    colour: Colour
    kind: Literal["f32", "bf16"]
    way: Literal["up"] | Literal["down"] | None
    factors: tuple[float, ...]
    size: tuple[int, str]
    is_tied: bool


def make_model() -> Model:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dense = Dense(weight=numbers(3, 5), bias=numbers(3))
    experts = Experts(
        router=numbers(2, 5).to(torch.bfloat16),
        members=(Dense(weight=numbers(7), bias=None), dense),
    )
    return Model(
        table=numbers(9, 4),
        layers=(dense, experts, Dense(weight=torch.arange(200, dtype=torch.uint8), bias=None)),
        colour=Colour.BLUE,
        kind="bf16",
        way="down",
        factors=(0.1, 1e-30, 3.0),
        size=(4, "four"),
        is_tied=True,
    )


def assert_same(found: Model, wanted: Model) -> None:
    assert torch.equal(found.table, wanted.table)
    plain = ("colour", "kind", "way", "factors", "size", "is_tied")
    assert all(getattr(found, name) == getattr(wanted, name) for name in plain)
    for one, other in zip(found.layers, wanted.layers, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Experts) and isinstance(other, Experts):
            assert one.router.dtype == other.router.dtype == torch.bfloat16
            assert torch.equal(one.router, other.router)
            pairs = zip(one.members, other.members, strict=True)
        else:
            pairs = zip([one], [other], strict=True)
        for a, b in pairs:
            assert a.weight.dtype == b.weight.dtype and torch.equal(a.weight, b.weight)
            assert (a.bias is None) == (b.bias is None)


def make_key(**changes: str) -> EngineKey:
    parts = {"checkpoint": "c" * 64, "dtype": "bf16", "cpu": "x86_64 avx2", "code": "d" * 64}
    return EngineKey(**(parts | changes))
