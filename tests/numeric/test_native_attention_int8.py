"""int8 KV storage: the same bits everywhere, and what becomes of them.

Attention over int8 is tested with all other attention, in test_native_attention.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.torch_attention import TorchAttention
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.kv_storage import quantize_heads
from inflight.native.library import NativeLibrary
from tests.numeric.attention_cases import (
    LAYER,
    computed_output,
    dequantized_case,
    library,
    poison,
    rows_before,
    split_at_iteration,
)
from tests.numeric.native_library import native_library
from tests.numeric.test_torch_attention import MIXED, PLAIN, RULES, make_case

pytestmark = pytest.mark.numeric

__all__ = ["library"]  # the fixture

CPU = torch.device("cpu")


def heads_to_store() -> Tensor:
    """[T, 2, 64]: numbers of all sizes, and what is hard to round."""
    heads = torch.randn((40, 2, 64), generator=torch.Generator().manual_seed(1))
    heads *= torch.logspace(-30, 30, 40)[:, None, None]
    heads[0] = 0.0
    heads[1] = torch.arange(64) - 31.5  # with a scale of 1, halves
    heads[1, :, 0] = 127.0
    heads[2] = -heads[1]
    heads[3] = 1e-45  # the smallest number there is: a 127th of it is 0
    heads[4] = 0.0
    heads[4, :, 5] = -3.0
    return heads


def stored(attention: NativeAttention, slot: int, head: int, size: int) -> tuple[Tensor, ...]:
    """K, its scale, V and its scale, read as src/attention.h says they lie."""
    tokens = 32
    block, offset = divmod(slot, tokens)
    panels = attention.storage[0, block].view(2, 2, -1)[head]
    keys, values = panels[:, : size * tokens]
    scales = panels[:, size * tokens :].contiguous().view(torch.float32)
    return (
        keys.view(size, tokens)[:, offset],
        scales[0, offset],
        values.view(tokens, size)[offset],
        scales[1, offset],
    )


def test_what_is_stored_is_the_reference_bit_for_bit(library: NativeLibrary) -> None:
    heads = heads_to_store()
    num_tokens, _, size = heads.shape
    case = make_case([(num_tokens, num_tokens)], LAYER, num_heads=2, tokens_per_block=32)
    attention = NativeAttention(
        library, num_layers=1, num_kv_heads=2, head_dim=size, dtype=torch.int8
    )
    attention.allocate(case.num_blocks, 32)
    poison(attention.storage)
    attention.plan(case.inputs)
    rules = LayerRules(num_heads=2, head_dim=size, scale=1.0)
    attention.attend_heads(0, rules, heads, heads, -heads, torch.empty(num_tokens, 2 * size))
    keys, key_scales = quantize_heads(heads)
    values, value_scales = quantize_heads(-heads)
    for token, slot in enumerate(case.inputs.slot_mapping):
        for head in range(2):
            key, key_scale, value, value_scale = stored(attention, int(slot), head, size)
            assert torch.equal(key, keys[token, head])
            assert torch.equal(value, values[token, head])
            assert key_scale == key_scales[token, head]
            assert value_scale == value_scales[token, head]


def test_a_head_is_off_by_half_a_step_at_most() -> None:
    heads = torch.randn((500, 64), generator=torch.Generator().manual_seed(2))
    whole, scales = quantize_heads(heads)
    assert whole.abs().amax() == 127
    steps = (whole * scales[:, None] - heads).abs() / scales[:, None]
    assert steps.max() <= 0.5001
    assert torch.equal(scales, heads.abs().amax(-1) / 127)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_reference_attends_over_the_same_numbers(name: str) -> None:
    case, expected = dequantized_case(tuple(MIXED), LAYER, RULES[name], 4, 8)
    backend = TorchAttention(torch.int8, CPU)
    backend.allocate([LAYER], num_blocks=case.num_blocks, tokens_per_block=8)
    for tensor in backend.storage[0]:
        poison(tensor)
    keys = [torch.from_numpy(rows) for rows in split_at_iteration(case, case.keys)]
    values = [torch.from_numpy(rows) for rows in split_at_iteration(case, case.values)]
    query = torch.from_numpy(case.query).float()
    backend.begin_iteration(rows_before(case.inputs, 8))
    backend.attend(
        0, query.new_zeros(len(keys[0]), *query.shape[1:]), keys[0], values[0], RULES[name]
    )
    backend.begin_iteration(case.inputs)
    got = backend.attend(0, query, keys[1], values[1], RULES[name])
    np.testing.assert_allclose(got.double().numpy(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(library: NativeLibrary, bad: float) -> None:
    """A broken layer is to be seen, not rounded to a number."""
    case = make_case([(3, 3)], LAYER, num_heads=4, tokens_per_block=32)
    for rows in (case.keys, case.values):
        broken = [rows[0].copy()]
        broken[0][1, 0, 7] = bad
        is_key = rows is case.keys
        spoiled = replace(case, keys=broken) if is_key else replace(case, values=broken)
        got = computed_output(library, spoiled, LAYER, PLAIN, 32, torch.float32, torch.int8)
        assert not np.isfinite(got[2, :2]).any() and np.isfinite(got[2, 2:]).all()


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_blocks_are_copied_with_their_scales(attention: str) -> None:
    case = make_case([(40, 40)], LAYER, num_heads=4, tokens_per_block=16)
    backend = (
        NativeAttentionBackend(native_library(), torch.int8)
        if attention == "native"
        else TorchAttention(torch.int8, CPU)
    )
    backend.allocate([LAYER] * 2, num_blocks=case.num_blocks, tokens_per_block=16)
    key, value = (torch.from_numpy(rows[0]).float() for rows in (case.keys, case.values))
    query = torch.from_numpy(case.query).float()
    backend.begin_iteration(case.inputs)
    expected = [backend.attend(layer, query, key, value * (layer + 1), PLAIN) for layer in (0, 1)]

    used = case.inputs.block_tables[0, :3]
    others = np.setdiff1d(np.arange(case.num_blocks), used)[:3].astype(np.int32)
    backend.copy_blocks(used, others)
    last = replace(
        case.inputs,
        position_ids=case.inputs.position_ids[-1:],
        slot_mapping=others[2:].astype(np.int64) * 16 + 39 % 16,
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        block_tables=others[None],
        num_context_sequences=0,
        num_context_tokens=0,
    )
    backend.begin_iteration(last)
    for layer in (0, 1):
        got = backend.attend(layer, query[-1:], key[-1:], value[-1:] * (layer + 1), PLAIN)
        torch.testing.assert_close(got[0], expected[layer][-1], atol=1e-5, rtol=0)


def test_bytes_per_token_are_those_of_the_storage() -> None:
    native = NativeAttentionBackend(native_library(), torch.int8)
    reference = TorchAttention(torch.int8, CPU)
    layers = [LAYER] * 3
    for backend in (native, reference):
        backend.allocate(layers, num_blocks=6, tokens_per_block=16)
    stored = sum(tensor.nbytes for tensors in reference.storage for tensor in tensors)
    assert native.storage.nbytes == stored == 6 * 16 * native.kv_bytes_per_token(layers)
    assert reference.kv_bytes_per_token(layers) == 3 * 2 * 2 * (64 + 4)
