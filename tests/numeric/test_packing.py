"""Packer: exact rows for a plan written out by hand, and for random plans against a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from tests.numeric.packed_driver import request_of

Array = np.ndarray[Any, Any]


def chunk(
    request_id: int, start: int, size: int, *, generation: bool = False, samples: bool = True
) -> ScheduledChunk:
    """Part of a request whose token at position p is 100 * request_id + p."""
    tokens = 100 * request_id + np.arange(start + size + 2)
    phase = Phase.GENERATION if generation else Phase.CONTEXT
    return ScheduledChunk(request_of(request_id, tokens), phase, start, size, samples)


def small_packer() -> Packer:
    return Packer(
        max_num_tokens=32, max_batch_size=8, max_blocks_per_sequence=12, tokens_per_block=4
    )


def table(*ids: int) -> Array:
    return np.array(ids, dtype=np.int32)


def test_a_mixed_plan_is_packed_row_by_row() -> None:
    plan = ScheduledBatch(
        0,
        context=(chunk(1, 4, 3, samples=False), chunk(2, 0, 2)),
        generation=(chunk(3, 8, 1, generation=True), chunk(4, 3, 1, generation=True)),
    )
    tables = {1: table(9, 5), 2: table(0), 3: table(7, 2, 4), 4: table(3)}
    inputs = small_packer().pack(plan, tables.__getitem__)

    assert inputs.token_ids.tolist() == [104, 105, 106, 200, 201, 308, 403]
    assert inputs.position_ids.tolist() == [4, 5, 6, 0, 1, 8, 3]
    assert inputs.slot_mapping.tolist() == [20, 21, 22, 0, 1, 16, 15]
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 5, 6, 7]
    assert inputs.context_lens.tolist() == [7, 2, 9, 4]
    assert inputs.logits_indices.tolist() == [4, 5, 6]
    assert [inputs.block_tables[i, :n].tolist() for i, n in enumerate((2, 1, 3, 1))] == [
        ids.tolist() for ids in tables.values()
    ]
    assert (inputs.num_context_sequences, inputs.num_context_tokens) == (2, 5)
    for name, dtype in (
        ("token_ids", np.int64),
        ("position_ids", np.int64),
        ("slot_mapping", np.int64),
        ("cu_seqlens_q", np.int32),
        ("context_lens", np.int32),
        ("block_tables", np.int32),
        ("logits_indices", np.int64),
    ):
        assert getattr(inputs, name).dtype == dtype, name


def test_contexts_alone_that_do_not_end_ask_for_no_logits() -> None:
    plan = ScheduledBatch(0, context=(chunk(1, 0, 4, samples=False),))
    inputs = small_packer().pack(plan, {1: table(6)}.__getitem__)
    assert inputs.logits_indices.shape == (0,)
    assert inputs.logits_indices.dtype == np.int64
    assert inputs.slot_mapping.tolist() == [24, 25, 26, 27]


def test_the_buffers_are_the_same_ones_every_time() -> None:
    packer = small_packer()
    tables = {1: table(6, 1), 2: table(3)}
    first = packer.pack(ScheduledBatch(0, context=(chunk(1, 0, 5),)), tables.__getitem__)
    second = packer.pack(
        ScheduledBatch(1, generation=(chunk(2, 2, 1, generation=True),)), tables.__getitem__
    )
    for name in ("token_ids", "position_ids", "slot_mapping", "block_tables", "context_lens"):
        assert np.shares_memory(getattr(first, name), getattr(second, name)), name
    assert second.token_ids.tolist() == [202]
    assert second.slot_mapping.tolist() == [14]


@pytest.mark.parametrize("too_much", ["tokens", "sequences", "blocks"])
def test_a_plan_beyond_the_limits_is_never_cut_to_fit(too_much: str) -> None:
    size, count, width = {"tokens": (17, 2, 5), "sequences": (1, 9, 1), "blocks": (1, 1, 13)}[
        too_much
    ]
    plan = ScheduledBatch(0, context=tuple(chunk(i, 0, size) for i in range(count)))
    with pytest.raises((ValueError, IndexError)):
        small_packer().pack(plan, lambda request_id: table(*range(width)))


def packed_by_a_plain_loop(plan: ScheduledBatch, tables: list[Array], size: int) -> dict[str, Any]:
    rows: dict[str, Any] = {name: [] for name in ("token_ids", "position_ids", "slot_mapping")}
    rows |= {"cu_seqlens_q": [0], "context_lens": [], "logits_indices": []}
    for part in plan.chunks:
        for position in range(part.start, part.end):
            block = int(tables[part.request.request_id][position // size])
            rows["token_ids"].append(int(part.request.token_ids[position]))
            rows["position_ids"].append(position)
            rows["slot_mapping"].append(block * size + position % size)
        rows["cu_seqlens_q"].append(len(rows["token_ids"]))
        rows["context_lens"].append(part.end)
        if part.samples:
            rows["logits_indices"].append(len(rows["token_ids"]) - 1)
    return rows


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), max_size=5),
    generations=st.lists(st.integers(1, 60), max_size=6),
    tokens_per_block=st.integers(1, 33),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_plans(
    contexts: list[tuple[int, int, bool]],
    generations: list[int],
    tokens_per_block: int,
    seed: int,
) -> None:
    contexts.sort(key=lambda context: context[2])  # those that sample are a plan's tail
    parts = [(start, size, Phase.CONTEXT, samples) for start, size, samples in contexts]
    parts += [(start, 1, Phase.GENERATION, True) for start in generations]
    if not parts:
        return
    rng = np.random.default_rng(seed)
    chunks = tuple(
        ScheduledChunk(request_of(i, rng.integers(0, 99, start + size)), phase, start, size, ends)
        for i, (start, size, phase, ends) in enumerate(parts)
    )
    plan = ScheduledBatch(0, context=chunks[: len(contexts)], generation=chunks[len(contexts) :])
    tables = [
        rng.permutation(500)[: -(-part.end // tokens_per_block)].astype(np.int32) for part in chunks
    ]
    packer = Packer(
        max_num_tokens=128,
        max_batch_size=12,
        max_blocks_per_sequence=64,
        tokens_per_block=tokens_per_block,
    )
    inputs: PackedInputs = packer.pack(plan, tables.__getitem__)
    for name, expected in packed_by_a_plain_loop(plan, tables, tokens_per_block).items():
        assert getattr(inputs, name).tolist() == expected, name
    for i, ids in enumerate(tables):
        assert inputs.block_tables[i, : len(ids)].tolist() == ids.tolist()
    assert inputs.num_context_tokens == sum(size for _, size, _ in contexts)
