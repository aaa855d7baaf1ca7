"""TorchAttention against a softmax written head by head, key by key, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from inflight.api.kv_pools import first_block_seen
from inflight.errors import ConfigError
from inflight.model import row_groups
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.runner import PackedInputs
from inflight.model.torch_attention import TorchAttention

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
GARBAGE_BLOCK = 1 << 30
Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """Sequences with their whole K and V; the last rows of each are the iteration's own."""

    inputs: PackedInputs
    query: Array
    keys: list[Array]
    values: list[Array]
    num_blocks: int


def make_case(
    rows_and_contexts: list[tuple[int, int]],
    layer: KvLayer,
    *,
    num_heads: int,
    tokens_per_block: int,
) -> Case:
    """(rows, context length) per sequence, contexts before generations (of one row)."""
    rng = np.random.default_rng(11)
    rows = np.array([row for row, _ in rows_and_contexts])
    lengths = np.array([length for _, length in rows_and_contexts])
    counts = -(-lengths // tokens_per_block)
    blocks = rng.permutation(int(counts.sum()) + 3)
    tables = np.full((len(rows), counts.max() + 1), GARBAGE_BLOCK, dtype=np.int32)
    for i, ids in enumerate(np.split(blocks[: counts.sum()], np.cumsum(counts)[:-1])):
        tables[i, : len(ids)] = ids
    spans = [np.arange(n - r, n) for r, n in rows_and_contexts]
    positions = np.concatenate(spans)
    slots = [
        tables[i, span // tokens_per_block].astype(np.int64) * tokens_per_block
        + span % tokens_per_block
        for i, span in enumerate(spans)
    ]
    num_contexts = int((rows > 1).sum())
    inputs = PackedInputs(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        position_ids=positions,
        slot_mapping=np.concatenate(slots),
        cu_seqlens_q=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_lens=lengths.astype(np.int32),
        block_tables=tables,
        logits_indices=np.zeros(0, dtype=np.int64),
        num_context_sequences=num_contexts,
        num_context_tokens=int(rows[:num_contexts].sum()),
    )
    return Case(
        inputs=inputs,
        query=rng.normal(size=(len(positions), num_heads, layer.key_dim)) * 2,
        keys=[rng.normal(size=(n, layer.num_kv_heads, layer.key_dim)) for n in lengths],
        values=[rng.normal(size=(n, layer.num_kv_heads, layer.value_dim)) for n in lengths],
        num_blocks=len(blocks),
    )


def passed_blocks(case: Case, window: int | None, tokens_per_block: int) -> list[int]:
    """Blocks that no row of the iteration sees any more: they may be somebody else's by now."""
    rows = np.diff(case.inputs.cu_seqlens_q)
    passed: list[int] = []
    for table, first in zip(case.inputs.block_tables, case.inputs.context_lens - rows, strict=True):
        passed += table[: first_block_seen(int(first), window, tokens_per_block)].tolist()
    return passed


def expected_output(case: Case, rules: AttentionRules) -> Array:
    outputs = []
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first, end = case.inputs.cu_seqlens_q[i : i + 2]
        for row in range(first, end):
            position = int(case.inputs.position_ids[row])
            outputs.append(one_row(case.query[row], keys, values, position, rules))
    return np.stack(outputs)


def one_row(
    query: Array, keys: Array, values: Array, position: int, rules: AttentionRules
) -> Array:
    window = rules.sliding_window or position + 1
    seen = range(max(0, position - window + 1), position + 1)
    heads = []
    for head, vector in enumerate(query):
        kv_head = head * keys.shape[1] // len(query)
        scores = [rules.scale * float(vector @ keys[key, kv_head]) for key in seen]
        if rules.softcap is not None:
            scores = [rules.softcap * math.tanh(score / rules.softcap) for score in scores]
        total = sum(math.exp(score) for score in scores)
        if rules.sinks is not None:
            total += math.exp(float(rules.sinks[head]))
        weighted = [
            math.exp(score) / total * values[key, kv_head]
            for score, key in zip(scores, seen, strict=True)
        ]
        heads.append(np.sum(weighted, axis=0))
    return np.stack(heads)


def computed_output(
    case: Case,
    layer: KvLayer,
    rules: AttentionRules,
    tokens_per_block: int,
    dtype: torch.dtype = torch.float32,
) -> Array:
    """Fills the cache with what came before, poisons all other slots, and attends."""
    backend = TorchAttention(dtype, CPU)
    backend.allocate([layer], num_blocks=case.num_blocks, tokens_per_block=tokens_per_block)
    for tensor in backend.storage[0]:
        tensor.fill_(torch.nan)
    for source, stored in (
        (case.keys, backend.storage[0][0]),
        (case.values, backend.storage[0][1]),
    ):
        for i, whole in enumerate(source):
            rows = int(case.inputs.cu_seqlens_q[i + 1] - case.inputs.cu_seqlens_q[i])
            for position in range(len(whole) - rows):
                block, offset = divmod(position, tokens_per_block)
                row = torch.from_numpy(whole[position]).to(dtype)
                stored[:, case.inputs.block_tables[i, block], offset] = row
        stored[:, passed_blocks(case, rules.sliding_window, tokens_per_block)] = torch.nan
    backend.begin_iteration(case.inputs)
    counts = np.diff(case.inputs.cu_seqlens_q)
    key, value = (
        torch.from_numpy(np.concatenate([w[-n:] for w, n in zip(whole, counts, strict=True)]))
        for whole in (case.keys, case.values)
    )
    query = torch.from_numpy(case.query).to(dtype)
    output = backend.attend(0, query, key.to(dtype), value.to(dtype), rules)
    assert output.dtype == dtype
    return output.double().numpy()


MIXED = [(5, 5), (9, 21), (2, 13), (1, 1), (1, 16), (1, 17), (1, 40)]
LAYER = KvLayer(num_kv_heads=2, key_dim=12, value_dim=12)
PLAIN = AttentionRules(scale=0.3)


@pytest.mark.parametrize("tokens_per_block", [1, 3, 8, 16, 32, 64])
def test_every_block_size(tokens_per_block: int) -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=tokens_per_block)
    got = computed_output(case, LAYER, PLAIN, tokens_per_block)
    np.testing.assert_allclose(got, expected_output(case, PLAIN), atol=2e-5)


RULES = {
    "window of one": AttentionRules(scale=0.3, sliding_window=1),
    "window": AttentionRules(scale=0.3, sliding_window=6),
    "softcap": AttentionRules(scale=0.5, softcap=1.5),
    "sinks": AttentionRules(scale=0.3, sinks=torch.tensor([1.0, -2.0, 3.0, 0.5])),
    "all": AttentionRules(
        scale=0.4, sliding_window=9, softcap=2.0, sinks=torch.tensor([0.1, 2.0, -1.0, 1.0])
    ),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule(name: str) -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=8)
    got = computed_output(case, LAYER, RULES[name], 8)
    np.testing.assert_allclose(got, expected_output(case, RULES[name]), atol=2e-5)
    assert np.abs(got - expected_output(case, PLAIN)).max() > 0.05


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_grouped_heads_and_values_of_another_size(num_kv_heads: int) -> None:
    layer = KvLayer(num_kv_heads=num_kv_heads, key_dim=12, value_dim=7)
    case = make_case(MIXED, layer, num_heads=6, tokens_per_block=8)
    got = computed_output(case, layer, PLAIN, 8)
    np.testing.assert_allclose(got, expected_output(case, PLAIN), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype: torch.dtype) -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=8)
    got = computed_output(case, LAYER, PLAIN, 8, dtype)
    np.testing.assert_allclose(got, expected_output(case, PLAIN), atol=0.05)


def test_splitting_rows_into_small_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "MAX_KEYS", 48)
    monkeypatch.setattr(row_groups, "MAX_SCORES", 64)
    monkeypatch.setattr(row_groups, "EVEN_LENGTH", 4)
    sizes = [*MIXED, (1, 3), (1, 18), (1, 19), (1, 20)]
    case = make_case(sizes, LAYER, num_heads=4, tokens_per_block=4)
    groups = row_groups.group_rows(case.inputs, 4, CPU)
    rows = sorted(row for group in groups for row in group.rows.tolist())
    assert rows == list(range(len(case.inputs.position_ids)))
    shapes = {(group.num_sequences > 1, group.num_rows > 1) for group in groups}
    assert shapes == {(False, False), (False, True), (True, False)}
    got = computed_output(case, LAYER, RULES["all"], 4)
    np.testing.assert_allclose(got, expected_output(case, RULES["all"]), atol=2e-5)


def test_generations_of_very_different_length_do_not_share_padding() -> None:
    case = make_case(
        [(1, 5), (1, 300), (1, 3000)], KvLayer(num_kv_heads=1, key_dim=2, value_dim=2),
        num_heads=1, tokens_per_block=32,
    )  # fmt: skip
    groups = row_groups.group_rows(case.inputs, 32, CPU)
    assert sorted(group.num_keys for group in groups) == [320, 3008]


def test_copied_blocks_hold_the_same_in_every_layer() -> None:
    layers = [LAYER, KvLayer(num_kv_heads=1, key_dim=4, value_dim=6)]
    backend = TorchAttention(torch.float32, CPU)
    backend.allocate(layers, num_blocks=6, tokens_per_block=4)
    for tensor in (tensor for pair in backend.storage for tensor in pair):
        tensor.normal_()
    before = [tensor.clone() for pair in backend.storage for tensor in pair]
    # 1 -> 4 and 4 -> 2 at once: block 2 gets what 4 held before.
    backend.copy_blocks(np.array([1, 4], dtype=np.int32), np.array([4, 2], dtype=np.int32))
    after = [tensor for pair in backend.storage for tensor in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, [0, 1, 3, 5]], old[:, [0, 1, 3, 5]])
        assert torch.equal(new[:, 4], old[:, 1]) and torch.equal(new[:, 2], old[:, 4])


def test_bytes_per_token_are_those_of_the_storage() -> None:
    layers = [LAYER, KvLayer(num_kv_heads=1, key_dim=4, value_dim=6)]
    for dtype in (torch.float32, torch.bfloat16):
        backend = TorchAttention(dtype, CPU)
        backend.allocate(layers, num_blocks=6, tokens_per_block=4)
        stored = sum(tensor.nbytes for pair in backend.storage for tensor in pair)
        assert backend.kv_bytes_per_token(layers) * 6 * 4 == stored


def test_a_pool_that_does_not_fit_is_a_configuration_error() -> None:
    backend = TorchAttention(torch.float32, CPU)
    with pytest.raises(ConfigError, match="no memory for 1099511627776 KV blocks"):
        backend.allocate([LAYER], num_blocks=1 << 40, tokens_per_block=32)
