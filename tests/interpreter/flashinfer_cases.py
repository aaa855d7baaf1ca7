"""FlashInfer behind our adapter, against the reference that our own attention is held to.

The tests run these cases on a fake of the library, tests/gpu/flashinfer.py on the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from inflight.kernels.tuning import AttentionShape as HeadShape
from inflight.model.device.cuda_runtime import CudaRuntime
from inflight.model.device.flashinfer_attention import (
    SUPPORTED_DTYPES,
    SUPPORTED_HEAD_DIMS,
    FlashInferAttention,
    ScoreKind,
)
from inflight.model.device.flashinfer_choice import HostSequences
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.device.runtime import DeviceRuntime
from tests.interpreter.attention_cases import SHAPES, AttentionShape, expected, make_iteration
from tests.interpreter.case import Case, excess, poisoned, rounding

KERNEL = "attend by FlashInfer"
GARBAGE = 1000.0
"""In slots that were not written: it would show in a result."""


def flashinfer_cases() -> Iterator[Case]:
    for dtype in SUPPORTED_DTYPES:
        for shape in _shapes():
            run = partial(run_flashinfer, dtype, shape)
            words = f"{shape.words}, window {shape.window}, soft-cap {shape.softcap}"
            yield Case(kernel=KERNEL, dtype=dtype, shape=words, sizes=shape.sizes, run=run)


def _shapes() -> tuple[AttentionShape, ...]:
    """Those of our kernels that FlashInfer takes, without what it has no say in."""
    plain = (
        replace(shape, programs=1, keys=16, tile_rows=16, has_sinks=False, idle=0)
        for shape in SHAPES
        if shape.head_dim in SUPPORTED_HEAD_DIMS
    )
    return tuple(dict.fromkeys(plain))


def run_flashinfer(dtype: torch.dtype, shape: AttentionShape, device: torch.device) -> float:
    runtime = runtime_of(device)
    with runtime.computing():
        iteration = make_iteration(dtype, shape, device)
        heads = HeadShape(
            num_heads=shape.heads[0],
            num_kv_heads=shape.heads[1],
            head_dim=shape.head_dim,
            tokens_per_block=shape.tokens_per_block,
            dtype=dtype,
        )
        attention = FlashInferAttention(heads, [ScoreKind.of(iteration.rules)], runtime)
        query, cache, rules = iteration.query, iteration.cache, iteration.rules
        if device.type == "cuda":  # it may multiply what it masks by 0
            cache.nan_to_num_(nan=GARBAGE)
        out = poisoned(*query.shape, dtype=dtype, device=device)
        attention.plan(HostSequences.of(iteration.rows))
        first = sum(rows for rows, _ in shape.sequences[: shape.num_contexts])
        if first:
            attention.attend_contexts(query[:first], cache, rules, out[:first])
        if first < len(query):
            attention.attend_generations(query[first:], cache, rules, out[first:])
        # The fake rounds once, kernels round weights too.
        tolerance = (2 if device.type == "cpu" else 6) * rounding(dtype, device)
        return excess(out, expected(iteration, shape), tolerance)


def runtime_of(device: torch.device) -> DeviceRuntime:
    return CudaRuntime(device) if device.type == "cuda" else PlainRuntime(device)
