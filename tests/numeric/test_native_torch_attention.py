"""The custom op of attention: torch's own checks of it, and what NativeAttention gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.library import NativeLibrary
from inflight.native.torch_ops import register_torch_ops
from tests.numeric.attention_cases import LAYER, rows_before
from tests.numeric.native_library import native_library
from tests.numeric.test_torch_attention import MIXED, Case, make_case

pytestmark = pytest.mark.numeric

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK = 4, LAYER.num_kv_heads, LAYER.key_dim, 32
WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
SHAPE = {
    "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "tokens_per_block": TOKENS_PER_BLOCK,
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    library = native_library()
    register_torch_ops(library)
    return library


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(MIXED, LAYER, num_heads=NUM_HEADS, tokens_per_block=TOKENS_PER_BLOCK)


def random_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def arrays_of(inputs: PackedInputs) -> list[Tensor]:
    arrays = (inputs.position_ids, inputs.slot_mapping, inputs.cu_seqlens_q, inputs.context_lens,
              inputs.block_tables)  # fmt: skip
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def attention_of(library: NativeLibrary, case: Case, dtype: torch.dtype) -> NativeAttention:
    attention = NativeAttention(
        library, num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    attention.allocate(case.num_blocks, TOKENS_PER_BLOCK)
    return attention


RULES: dict[str, dict[str, Any]] = {
    "plain": {"scale": 0.1},
    "all": {
        "scale": 0.1, "softcap": 5.0, "sliding_window": 40, "sinks": random_of(NUM_HEADS),
        "cos_sin": random_of(512, HEAD_DIM), "q_norm": random_of(HEAD_DIM).abs(),
        "k_norm": random_of(HEAD_DIM).abs(), "norm_epsilon": 1e-5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_op_is_the_library(
    library: NativeLibrary, case: Case, name: str, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Two iterations, the second of which reads what the first wrote."""
    attention, rules = attention_of(library, case, kv_dtype), RULES[name]
    layer = LayerRules(num_heads=NUM_HEADS, head_dim=HEAD_DIM, **rules)
    cache = torch.zeros_like(attention.storage[0])
    for inputs in (rows_before(case.inputs, TOKENS_PER_BLOCK), case.inputs):
        qkv = random_of(len(inputs.position_ids), WIDTH).to(dtype)
        expected = torch.empty(len(qkv), NUM_HEADS * HEAD_DIM, dtype=dtype)
        attention.plan(inputs)
        attention.attend(0, layer, qkv, expected)
        found = torch.ops.inflight.attend(qkv, cache, *arrays_of(inputs), **SHAPE, **rules)
        assert found.dtype == dtype and torch.equal(found, expected)
        assert torch.equal(cache.view(torch.uint8), attention.storage[0].view(torch.uint8))


def test_torch_finds_nothing_wrong(library: NativeLibrary, case: Case) -> None:
    cache = torch.zeros_like(attention_of(library, case, torch.bfloat16).storage[0])
    qkv = random_of(len(case.inputs.position_ids), WIDTH)
    for rules in RULES.values():
        op, arguments = torch.ops.inflight.attend.default, (qkv, cache, *arrays_of(case.inputs))
        results = torch.library.opcheck(op, arguments, {**SHAPE, **rules})
        assert set(results.values()) == {"SUCCESS"}, results


def test_what_does_not_fit_is_refused(library: NativeLibrary, case: Case) -> None:
    cache = torch.zeros_like(attention_of(library, case, torch.bfloat16).storage[0])
    qkv, arrays = random_of(len(case.inputs.position_ids), WIDTH), arrays_of(case.inputs)

    def refused(match: str, place: int | None = None, value: Any = None, **rules: Any) -> None:
        arguments: list[Tensor] = [qkv, cache, *arrays]
        if place is not None:
            arguments[place] = value
        with pytest.raises(ValueError, match=match):
            torch.ops.inflight.attend(*arguments, **{**SHAPE, "scale": 0.1, **rules})

    refused("float16", 0, qkv.half())
    refused("head sizes", 0, qkv[:, :-8])
    refused("4 query heads for 3 KV heads", num_kv_heads=3)
    refused("float64 in blocks of 32", 1, cache.double())
    refused("blocks of 33 tokens", tokens_per_block=33)
    refused("contiguous", 1, cache[:, 1:])
    refused("position_ids: torch.int64", 2, arrays[0].int())
    refused("positions for", 0, qkv[1:])
    refused("do not fit each other", 5, arrays[3][1:])
    refused("do not fit each other", 4, arrays[2][:0])
    refused("do not fit each other", 2, -arrays[0])
    refused("block or slot outside", 3, arrays[1] + len(cache) * TOKENS_PER_BLOCK)
    refused("block or slot outside", 6, arrays[4] - 1 - arrays[4].max())
    refused("cos_sin has 3 positions", cos_sin=random_of(3, HEAD_DIM))
