"""What tests/gpu/kernel_speed.py measures: each kernel on the shapes of Llama 3 8B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from inflight.kernels.activations import gated_product
from inflight.kernels.attention import AttentionPlan, attend
from inflight.kernels.blocks import copy_blocks
from inflight.kernels.kv_layout import KvShape
from inflight.kernels.launch import AttentionLaunches
from inflight.kernels.likeliest import likeliest, likeliest_parts
from inflight.kernels.rms_norm import rms_norm
from inflight.kernels.rope import rope_and_write
from inflight.kernels.tuning import AttentionShape, Load, make_load
from inflight.model.device.flashinfer_attention import FlashInferAttention, ScoreKind
from inflight.model.device.flashinfer_choice import HostSequences
from tests.interpreter.flashinfer_cases import runtime_of

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: int
    width: int
    inner: int
    vocab: int
    heads: tuple[int, int]
    head_dim: int
    tokens_per_block: int
    generations: tuple[tuple[int, int], ...]
    """(sequences, tokens of each)."""
    contexts: tuple[tuple[int, int, int], ...]
    """(sequences, rows of each, tokens of each)."""
    copied_bytes: int
    square: int
    """Of the matrix product."""


LLAMA = Sizes(
    rows=8192,
    width=4096,
    inner=14336,
    vocab=128256,
    heads=(32, 8),
    head_dim=128,
    tokens_per_block=32,  # the default
    generations=((1, 8192), (8, 4096), (64, 2048), (256, 1024)),
    contexts=((1, 2048, 2048), (1, 8192, 8192), (8, 512, 4096)),
    copied_bytes=1 << 30,
    square=8192,
)
SMALL = Sizes(
    rows=4,
    width=256,
    inner=512,
    vocab=5000,
    heads=(4, 2),
    head_dim=64,
    tokens_per_block=16,
    generations=((1, 64), (3, 32)),
    contexts=((1, 16, 32),),
    copied_bytes=1 << 20,
    square=128,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call of ``run`` moves, or computes."""

    what: str
    run: Callable[[], object]
    num_bytes: float = 0.0
    operations: float = 0.0
    note: str = ""


def copy_work(sizes: Sizes, device: torch.device) -> Work:
    source = torch.zeros(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Work(
        what=f"copy of {sizes.copied_bytes >> 20} MiB, read and written",
        run=lambda: target.copy_(source),
        num_bytes=2 * sizes.copied_bytes,
    )


def product_work(sizes: Sizes, device: torch.device) -> Work:
    n = sizes.square
    a, b = (torch.randn(n, n, device=device).to(DTYPE) for _ in range(2))
    out = torch.empty_like(a)
    what = f"torch's matrix product {n} x {n} x {n} bf16"
    return Work(what=what, run=lambda: torch.mm(a, b, out=out), operations=2.0 * n**3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """``HeadRules`` and ``ScoreRules``."""

    num_heads: int
    head_dim: int
    cos_sin: torch.Tensor | None = None
    scale: float = 0.1
    q_norm: None = None
    k_norm: None = None
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0
    sliding_window: None = None
    softcap: None = None
    sinks: None = None


def elementwise(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    rows, width, inner = sizes.rows, sizes.width, sizes.inner
    item = DTYPE.itemsize

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(DTYPE)

    residual, delta, normed = tensor(rows, width), tensor(rows, width), tensor(rows, width)
    weight = torch.ones(width, device=device)
    yield Work(
        what=f"rms_norm + residual {rows} x {width}",
        run=lambda: rms_norm(residual, weight, 1e-5, normed, delta=delta),
        num_bytes=4 * rows * width * item,
    )
    gate_up, product = tensor(rows, 2 * inner), tensor(rows, inner)
    yield Work(
        what=f"gated_product silu {rows} x {inner}",
        run=lambda: gated_product(gate_up, product, "silu"),
        num_bytes=3 * rows * inner * item,
    )
    logits = tensor(64, sizes.vocab)
    ids = torch.empty(64, dtype=torch.int32, device=device)
    largest = torch.empty(64, device=device)
    parts = 64 * likeliest_parts(sizes.vocab)
    room = (torch.empty(parts, device=device), torch.empty(parts, device=device).int())
    yield Work(
        what=f"likeliest 64 x {sizes.vocab}",
        run=lambda: likeliest(logits, ids, largest, room),
        num_bytes=logits.nbytes,
        note="fits into the L2 cache",
    )
    yield from storage(sizes, device)


def storage(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    (heads, kv_heads), rows = sizes.heads, sizes.rows
    layout = KvShape(num_layers=2, num_kv_heads=kv_heads, head_dim=sizes.head_dim, dtype=DTYPE)
    num_blocks = max(4, 2 * rows // sizes.tokens_per_block)
    kv = layout.allocate(num_blocks, sizes.tokens_per_block, device)
    kv.zero_()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * sizes.head_dim, device=device).to(DTYPE)
    query = torch.empty(rows, heads, sizes.head_dim, dtype=DTYPE, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    slots = torch.randperm(num_blocks * sizes.tokens_per_block, device=device)[:rows].int()
    cos_sin = torch.randn(rows, sizes.head_dim, device=device)
    rules = Rules(num_heads=heads, head_dim=sizes.head_dim, cos_sin=cos_sin)
    yield Work(
        what=f"rope_and_write {rows} rows, {heads}/{kv_heads} heads of {sizes.head_dim}",
        run=lambda: rope_and_write(qkv, query, kv[0], positions, slots, rules),
        num_bytes=2 * qkv.nbytes,
    )
    ids = torch.randperm(num_blocks, device=device).int()
    sources, targets = ids[: num_blocks // 2].contiguous(), ids[num_blocks // 2 :].contiguous()
    yield Work(
        what=f"copy_blocks {num_blocks // 2} blocks of {sizes.tokens_per_block} tokens, 2 layers",
        run=lambda: copy_blocks(kv, sources, targets),
        num_bytes=kv.nbytes,
    )


def attention(sizes: Sizes, launches: AttentionLaunches, device: torch.device) -> Iterator[Work]:
    heads, kv_heads = sizes.heads
    plan = AttentionPlan.allocate(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim,
        launches=launches,
        device=device,
    )
    for load in loads(sizes):
        tensors, rules = make_load(load, attention_shape(sizes), device), rules_of(sizes)
        yield attention_work(
            sizes,
            load,
            "attend",
            partial(attend, tensors.query, tensors.cache, tensors.rows, rules, tensors.out, plan),
        )


def flashinfer(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """The same loads. Raises whatever FlashInfer fails with."""
    runtime, rules = runtime_of(device), ScoreKind.of(rules_of(sizes))
    theirs = FlashInferAttention(attention_shape(sizes), [rules], runtime)
    for load in loads(sizes):
        tensors = make_load(load, attention_shape(sizes), device)
        theirs.plan(HostSequences.of(tensors.rows))
        run = theirs.attend_contexts if load.rows > 1 else theirs.attend_generations
        yield attention_work(
            sizes,
            load,
            "attend by FlashInfer",
            partial(run, tensors.query, tensors.cache, rules, tensors.out),
        )


def attention_shape(sizes: Sizes) -> AttentionShape:
    heads, kv_heads = sizes.heads
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim,
        tokens_per_block=sizes.tokens_per_block,
        dtype=DTYPE,
    )


def rules_of(sizes: Sizes) -> Rules:
    return Rules(num_heads=sizes.heads[0], head_dim=sizes.head_dim, scale=sizes.head_dim**-0.5)


def loads(sizes: Sizes) -> Iterator[Load]:
    for sequences, length in sizes.generations:
        yield Load(sequences=sequences, rows=1, length=length)
    for sequences, rows, length in sizes.contexts:
        yield Load(sequences=sequences, rows=rows, length=length)


def attention_work(sizes: Sizes, load: Load, what: str, run: Callable[[], object]) -> Work:
    heads, kv_heads = sizes.heads
    is_context = load.rows > 1
    seen = load.sequences * sum(range(load.length - load.rows + 1, load.length + 1))
    num_bytes = 2 * load.sequences * load.length * kv_heads * sizes.head_dim * DTYPE.itemsize
    words = (
        f"{load.sequences} contexts of {load.rows} rows"
        if is_context
        else f"{load.sequences} generations"
    )
    return Work(
        what=f"{what} {words}, {load.length} tokens",
        run=run,
        num_bytes=0.0 if is_context else num_bytes,
        operations=4.0 * seen * heads * sizes.head_dim if is_context else 0.0,
        note="" if is_context or num_bytes > 1 << 27 else "may fit into the L2 cache",
    )
