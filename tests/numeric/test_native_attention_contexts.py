"""Contexts of several strips of rows: where they end in a tile of keys, and scores of all sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inflight.model.attention import AttentionRules, KvLayer
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.library import NativeLibrary
from tests.numeric.attention_cases import (
    INT8_TOLERANCE,
    LAYER,
    TOLERANCE,
    computed_output,
    dequantized,
    dequantized_case,
    library,
    textbook,
)
from tests.numeric.test_torch_attention import Case, expected_output, make_case

pytestmark = pytest.mark.numeric

__all__ = ["library"]  # the fixture

Kinds = list[tuple[torch.dtype, torch.dtype, float]]

# Contexts from the first token on, and on top of others; ends in either half of a tile, and at it.
ENDS = [(n, n) for n in (2, 17, 32, 33, 63, 64, 65, 97, 130)] + [(30, 94), (40, 129), (22, 190)]


def kinds_of(library: NativeLibrary, kv: str) -> Kinds:
    """Dtypes of activations and of storage, and what the result may be off."""
    if kv == "int8":
        return [(torch.float32, torch.int8, INT8_TOLERANCE[library.isa])]
    return [(dtype, dtype, tolerance) for dtype, tolerance in TOLERANCE.items()]


@pytest.mark.parametrize("kv", ["wide", "int8"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (40, 1)])
def test_a_context_that_ends_anywhere_in_a_tile(
    library: NativeLibrary, kv: str, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    """Also strips of a single query, and tiles that only some strips of an item see."""
    layer = KvLayer(num_kv_heads=num_kv_heads, key_dim=32, value_dim=32)
    rules = AttentionRules(scale=0.3, sliding_window=window)
    sequences = ENDS if num_heads < 40 else ENDS[1:4]
    shape = (tuple(sequences), layer, rules, num_heads, 32)
    case, expected = dequantized_case(*shape) if kv == "int8" else textbook(*shape)
    for dtype, kv_dtype, tolerance in kinds_of(library, kv):
        got = computed_output(library, case, layer, rules, 32, dtype, kv_dtype)
        np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0)


KEYS = np.arange(200)
SCORES = {
    "growing": KEYS // 16 * 12.0,
    "shrinking": KEYS[::-1] // 16 * 12.0,
    "in steps too small to be followed": KEYS // 64 * 4.0,
    "one far above": np.where(KEYS == 100, 220.0, 0.0),
    "one far below": np.where(KEYS == 100, -220.0, 0.0),
    "all far below": np.full(len(KEYS), -220.0),
    "far below at first": np.where(KEYS < 130, -240.0, 240.0),
}


def case_of_scores(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Case:
    """Every row has these scores; bf16 holds them exactly."""
    case = make_case([(90, len(scores)), (1, 150)], LAYER, num_heads=4, tokens_per_block=32)
    case.query[:] = 0.0
    case.query[..., 0] = 1.0
    for keys in case.keys:
        keys[..., 0] = scores[: len(keys), None]
    return case


@pytest.mark.parametrize("kv", ["wide", "int8"])
@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_of_all_sizes(library: NativeLibrary, kv: str, name: str) -> None:
    """What weights are relative to follows the scores from tile to tile."""
    case = case_of_scores(SCORES[name])
    rules = AttentionRules(scale=1.0)
    expected = expected_output(dequantized(case) if kv == "int8" else case, rules)
    for dtype, kv_dtype, tolerance in kinds_of(library, kv):
        got = computed_output(library, case, LAYER, rules, 32, dtype, kv_dtype)
        np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0)


def stored(library: NativeLibrary, case: Case, parts: list[slice]) -> torch.Tensor:
    """The bits of bf16 storage, when the rows come in these iterations."""
    key, value = (torch.from_numpy(of[0]).bfloat16() for of in (case.keys, case.values))
    query = torch.from_numpy(case.query).bfloat16()
    rules = LayerRules(num_heads=4, head_dim=64, scale=1.0, cos_sin=torch.ones(len(key), 64) * 0.7)
    attention = NativeAttention(
        library, num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
    )
    attention.allocate(case.num_blocks, 32)
    attention.storage.fill_(torch.nan)
    for rows in parts:
        part = replace(
            case.inputs,
            position_ids=case.inputs.position_ids[rows],
            slot_mapping=case.inputs.slot_mapping[rows],
            cu_seqlens_q=np.array([0, rows.stop - rows.start], dtype=np.int32),
            context_lens=np.array([rows.stop], dtype=np.int32),
        )
        attention.plan(part)
        out = torch.empty(rows.stop - rows.start, 4 * 64)
        attention.attend_heads(0, rules, query[rows], key[rows], value[rows], out)
    return attention.storage.view(torch.int16)


def test_what_is_stored_does_not_depend_on_how_the_tokens_come(library: NativeLibrary) -> None:
    """Of two tokens in one iteration both may be stored at once."""
    case = make_case([(70, 70)], LAYER, num_heads=4, tokens_per_block=32)
    one_by_one = stored(library, case, [slice(i, i + 1) for i in range(70)])
    at_once = stored(library, case, [slice(0, 70)])
    in_odd_parts = stored(library, case, [slice(0, 3), slice(3, 36), slice(36, 69), slice(69, 70)])
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(in_odd_parts, one_by_one)
