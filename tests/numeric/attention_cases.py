"""What the tests of attention share: storage full of poison, and the textbook beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.runner import PackedInputs
from inflight.native.kv_storage import quantize_heads
from inflight.native.library import Isa, NativeLibrary
from tests.numeric.native_library import library_limited_to
from tests.numeric.test_torch_attention import (
    RULES,
    Case,
    expected_output,
    make_case,
    passed_blocks,
)

Array = np.ndarray[Any, Any]

LAYER = KvLayer(num_kv_heads=2, key_dim=64, value_dim=64)
# Contexts of several row tiles, some on top of what was computed before; contexts and generations
# that end with a tile of keys, one after it, and in either half of a pair.
LARGE = [(45, 45), (33, 200), (2, 67), (1, 64), (1, 65), (1, 333)]
WIDE_WINDOW = replace(RULES["all"], sliding_window=150)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}
"""Results are of the size of 1; bf16 rounds K, V, queries and weights by up to 1 in 256 each."""
INT8_TOLERANCE = {Isa.PORTABLE: 1e-5, Isa.AVX2: 1e-5, Isa.AVX512: 0.04, Isa.AMX: 0.04}
"""From AVX-512 on queries and weights are rounded to bf16."""


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    library = library_limited_to(request.param)
    with library.limited_to(request.param):
        yield library


def rows_before(inputs: PackedInputs, tokens_per_block: int) -> PackedInputs:
    """What the sequences computed before the iteration, as an iteration of its own."""
    lengths = inputs.context_lens - np.diff(inputs.cu_seqlens_q)
    present = np.flatnonzero(lengths)
    positions = np.concatenate([np.arange(lengths[i]) for i in present])
    of_row = np.repeat(present, lengths[present])
    blocks = inputs.block_tables[of_row, positions // tokens_per_block].astype(np.int64)
    return replace(
        inputs,
        position_ids=positions,
        slot_mapping=blocks * tokens_per_block + positions % tokens_per_block,
        cu_seqlens_q=np.concatenate(([0], np.cumsum(lengths[present]))).astype(np.int32),
        context_lens=lengths[present].astype(np.int32),
        block_tables=inputs.block_tables[present],
    )


def split_at_iteration(case: Case, whole: list[Array]) -> tuple[Array, Array]:
    """The K or V of the rows before the iteration, and of its own."""
    counts = np.diff(case.inputs.cu_seqlens_q)
    before = [rows[: len(rows) - n] for rows, n in zip(whole, counts, strict=True)]
    own = [rows[len(rows) - n :] for rows, n in zip(whole, counts, strict=True)]
    return np.concatenate(before), np.concatenate(own)


def poison(storage: Tensor) -> None:
    """NaN everywhere; with int8 -1 everywhere, whose bytes are NaN where scales lie."""
    storage.fill_(torch.nan if storage.dtype.is_floating_point else -1)


def computed_output(
    library: NativeLibrary,
    case: Case,
    layer: KvLayer,
    rules: AttentionRules,
    tokens_per_block: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Array:
    backend = NativeAttentionBackend(library, kv_dtype)
    backend.allocate([layer], num_blocks=case.num_blocks, tokens_per_block=tokens_per_block)
    poison(backend.storage)
    keys = [torch.from_numpy(part).to(dtype) for part in split_at_iteration(case, case.keys)]
    values = [torch.from_numpy(part).to(dtype) for part in split_at_iteration(case, case.values)]
    query = torch.from_numpy(case.query).to(dtype)
    if len(keys[0]):
        backend.begin_iteration(rows_before(case.inputs, tokens_per_block))
        backend.attend(
            0, query.new_zeros((len(keys[0]), *query.shape[1:])), keys[0], values[0], rules
        )
    passed = passed_blocks(case, rules.sliding_window, tokens_per_block)
    if passed:
        backend.storage[:, passed] = torch.nan if kv_dtype.is_floating_point else -1
    backend.begin_iteration(case.inputs)
    output = backend.attend(0, query, keys[1], values[1], rules)
    assert output.dtype == dtype and output.shape == query.shape
    return output.double().numpy()


@cache
def textbook(
    sequences: tuple[tuple[int, int], ...],
    layer: KvLayer,
    rules: AttentionRules,
    num_heads: int,
    tokens_per_block: int,
) -> tuple[Case, Array]:
    case = make_case(list(sequences), layer, num_heads=num_heads, tokens_per_block=tokens_per_block)
    case.query *= 4 * layer.key_dim**-0.5  # scores of the size they have in models
    return case, expected_output(case, rules)


@cache
def dequantized_case(
    sequences: tuple[tuple[int, int], ...],
    layer: KvLayer,
    rules: AttentionRules,
    num_heads: int,
    tokens_per_block: int,
) -> tuple[Case, Array]:
    """The case as it is given, and the textbook's output on the K and V that int8 makes of it."""
    case = make_case(list(sequences), layer, num_heads=num_heads, tokens_per_block=tokens_per_block)
    case.query *= 4 * layer.key_dim**-0.5
    return case, expected_output(dequantized(case), rules)


def dequantized(case: Case) -> Case:
    """The case on the K and V that int8 makes of it."""

    def through_int8(rows: Array) -> Array:
        whole, scales = quantize_heads(torch.from_numpy(rows).float())
        result: Array = (whole.double() * scales.double().unsqueeze(-1)).numpy()
        return result

    return replace(
        case,
        keys=[through_int8(rows) for rows in case.keys],
        values=[through_int8(rows) for rows in case.values],
    )
