"""RMSNorm, activations and rope with the KV write, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from inflight.kernels.activations import Activation, activate, gated_product
from inflight.kernels.kv_layout import KvShape
from inflight.kernels.rms_norm import rms_norm
from inflight.kernels.rope import rope_and_write
from tests.interpreter.case import (
    DTYPES,
    Case,
    exact,
    excess,
    poisoned,
    random,
    rounding,
    seeded,
)

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def layer_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _norm_cases(dtype)
        yield from _activation_cases(dtype)
        yield from _rope_cases(dtype)


# RMSNorm


def _norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for width, has_own_residual, delta, offset in (
        (64, False, False, 0.0),
        (576, True, True, 0.0),
        (1000, False, True, 1.0),
        (4096, False, True, 0.0),
    ):
        residual_dtype = torch.float32 if has_own_residual else dtype
        words = f"width {width}" + ", residual fp32" * has_own_residual
        words += ", + delta" * delta + f", weight + {offset:g}" * bool(offset)
        run = partial(_run_norm, dtype, residual_dtype, width, has_delta=delta, offset=offset)
        yield Case(kernel="rms_norm", dtype=dtype, shape=words, sizes={"width": width}, run=run)
    yield Case(
        kernel="rms_norm",
        dtype=dtype,
        shape="width 256, in place, rows apart",
        sizes={"width": 256},
        run=partial(_run_norm_in_place, dtype),
    )


def _run_norm(
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    width: int,
    device: torch.device,
    *,
    has_delta: bool,
    offset: float,
) -> float:
    generator = seeded(width)
    residual = random(generator, 3, width).to(device, residual_dtype) * 3
    delta = random(generator, 3, width).to(device, dtype) if has_delta else None
    weight = random(generator, width).to(device)
    want_residual = residual.float() + (0.0 if delta is None else delta.float())
    out = poisoned(3, width, dtype=dtype, device=device)
    rms_norm(residual, weight, 1e-5, out, delta=delta, weight_offset=offset)
    want = _normalised(residual, weight, offset)
    return max(
        excess(out, want, rounding(dtype, device)),
        excess(residual, want_residual, rounding(residual_dtype, device)),
    )


def _run_norm_in_place(dtype: torch.dtype, device: torch.device) -> float:
    """Every second row of a buffer, whose other rows stay as they are."""
    buffer = random(seeded(5), 6, 256).to(device, dtype)
    weight = random(seeded(6), 256).to(device)
    before = buffer.clone()
    rms_norm(buffer[::2], weight, 1e-5, buffer[::2])
    want = _normalised(before[::2], weight, 0.0)
    return max(
        excess(buffer[::2], want, rounding(dtype, device)), exact(buffer[1::2], before[1::2])
    )


def _normalised(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    x = x.double()
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * factor * (weight.double() + offset)


# Activations


def _activation_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name in ACTIVATIONS:
        for is_gated in (True, False):
            for width in (96, 1100):
                yield Case(
                    kernel="gated_product" if is_gated else "activate",
                    dtype=dtype,
                    shape=f"{name}, width {width}",
                    sizes={"width": width},
                    run=partial(_run_activation, dtype, name, width, is_gated=is_gated),
                )


def _run_activation(
    dtype: torch.dtype, name: Activation, width: int, device: torch.device, *, is_gated: bool
) -> float:
    x = (random(seeded(width), 3, 2 * width if is_gated else width) * 3).to(device, dtype)
    out = poisoned(3, width, dtype=dtype, device=device)
    activated = _activated(x.double()[:, :width], name)
    if is_gated:
        gated_product(x, out, name)
        return excess(out, activated * x.double()[:, width:], 2 * rounding(dtype, device))
    activate(x, out, name)
    activate(x, x, name)
    return max(excess(out, activated, 2 * rounding(dtype, device)), exact(x, out))


def _activated(x: Tensor, name: Activation) -> Tensor:
    if name == "silu":
        return functional.silu(x)
    if name == "gelu":
        return functional.gelu(x)
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.relu(x) if name == "relu" else functional.relu(x).square()


# Rope and KV write


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """``rope.HeadRules``, with the KV heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int
    norm: str = "none"
    tokens_per_block: int = 16
    offset: float = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "head size": self.head_dim,
            "block": self.tokens_per_block,
            "turned": self.rotary_dim,
        }

    @property
    def words(self) -> str:
        norm = f", norm of {self.norm}" if self.norm != "none" else ""
        return (
            f"{self.heads[0]}/{self.heads[1]} heads of {self.head_dim}, rotary "
            f"{self.rotary_dim}, blocks of {self.tokens_per_block}{norm}"
            + f", weight + {self.offset:g}"
            * bool(self.offset)
        )


ROPE_SHAPES = (
    RopeShape(heads=(9, 3), head_dim=64, rotary_dim=64),
    RopeShape(heads=(4, 4), head_dim=80, rotary_dim=32, tokens_per_block=32),
    RopeShape(heads=(2, 1), head_dim=96, rotary_dim=96, norm="each head", tokens_per_block=64),
    RopeShape(heads=(12, 4), head_dim=128, rotary_dim=0, tokens_per_block=128),
    RopeShape(heads=(10, 2), head_dim=128, rotary_dim=128, norm="whole row"),
    RopeShape(heads=(4, 1), head_dim=256, rotary_dim=256, norm="each head", offset=1.0),
    RopeShape(heads=(16, 16), head_dim=112, rotary_dim=0, norm="whole row", offset=1.0),
)


def _rope_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ROPE_SHAPES:
        run = partial(_run_rope, dtype, shape)
        yield Case(
            kernel="rope_and_write", dtype=dtype, shape=shape.words, sizes=shape.sizes, run=run
        )


def _run_rope(dtype: torch.dtype, shape: RopeShape, device: torch.device) -> float:
    generator = seeded(shape.head_dim)
    rules = _heads(shape, generator, device)
    num_rows, num_blocks = 5, 4
    width = (rules.num_heads + 2 * rules.num_kv_heads) * shape.head_dim
    # The projection's rows lie apart, in a buffer that is made for more.
    qkv = (random(generator, num_rows, width + 32) * 2).to(device, dtype)[:, :width]
    before = qkv.clone()
    num_slots = num_blocks * shape.tokens_per_block
    slots = torch.randperm(num_slots, generator=generator)[:num_rows].int()
    positions = torch.tensor([0, 6, 49, 3, 6], dtype=torch.int32)
    layout = KvShape(
        num_layers=1, num_kv_heads=rules.num_kv_heads, head_dim=shape.head_dim, dtype=dtype
    )
    cache = layout.allocate(num_blocks, shape.tokens_per_block, device)[0].fill_(torch.nan)
    query = poisoned(num_rows, rules.num_heads, shape.head_dim, dtype=dtype, device=device)
    rope_and_write(qkv, query, cache, positions.to(device), slots.to(device), rules)

    want_query, keys, values = _split_and_turned(before.double(), positions, rules)
    want_cache = torch.full_like(cache, torch.nan, dtype=torch.double)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, shape.tokens_per_block)
        want_cache[0, block, :, offset] = keys[row]
        want_cache[1, block, :, offset] = values[row]
    written = ~want_cache.isnan()
    return max(
        excess(query, want_query, 2 * rounding(dtype, device)),
        excess(cache[written], want_cache[written], 2 * rounding(dtype, device)),
        0.0 if bool(cache[~written].isnan().all()) else torch.inf,
        exact(qkv, before),
    )


def _heads(shape: RopeShape, generator: torch.Generator, device: torch.device) -> Heads:
    num_heads, num_kv_heads = shape.heads
    norms: list[Tensor | None] = [None, None]
    if shape.norm != "none":
        of_row = shape.norm == "whole row"
        norms = [
            random(generator, shape.head_dim * (heads if of_row else 1)).to(device)
            for heads in shape.heads
        ]
    angles = random(generator, 50, shape.rotary_dim // 2) * 9
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).contiguous().to(device)
    return Heads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=shape.head_dim,
        cos_sin=cos_sin if shape.rotary_dim else None,
        q_norm=norms[0],
        k_norm=norms[1],
        norm_offset=shape.offset,
    )


def _split_and_turned(
    qkv: Tensor, positions: Tensor, rules: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(len(qkv), -1, rules.head_dim)
    counts = [rules.num_heads, rules.num_kv_heads, rules.num_kv_heads]
    query, key, value = torch.split(heads, counts, dim=1)
    return (
        _turned(_head_norm(query, rules.q_norm, rules), positions, rules),
        _turned(_head_norm(key, rules.k_norm, rules), positions, rules),
        value,
    )


def _head_norm(heads: Tensor, weight: Tensor | None, rules: Heads) -> Tensor:
    if weight is None:
        return heads
    spans = heads.reshape(len(heads), -1, len(weight))
    factor = torch.rsqrt(spans.square().mean(-1, keepdim=True) + rules.norm_epsilon)
    return (spans * factor * (weight.double() + rules.norm_offset)).view_as(heads)


def _turned(heads: Tensor, positions: Tensor, rules: Heads) -> Tensor:
    """Each pair of dimensions is a complex number, and turns by its angle."""
    if rules.cos_sin is None:
        return heads
    half = rules.cos_sin.shape[1] // 2
    angles = rules.cos_sin[positions.to(rules.cos_sin.device)].double()[:, None]
    turns = torch.complex(angles[..., :half], angles[..., half:])
    turned = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turns
    return torch.cat((turned.real, turned.imag, heads[..., 2 * half :]), dim=-1)
