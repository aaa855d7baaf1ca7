"""How generations are split: the partial sums always have room, and no split is empty for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from inflight.kernels import attention  # noqa: E402
from inflight.kernels.attention import MAX_SPLITS, AttentionPlan  # noqa: E402
from inflight.kernels.launch import AttentionLaunches, Launch  # noqa: E402

pytestmark = pytest.mark.interpreter

LAUNCH = Launch(rows=16, columns=32, num_warps=4, num_stages=2)


def plan_for(num_multiprocessors: int, heads: tuple[int, int]) -> AttentionPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "multiprocessors", lambda device: num_multiprocessors)
        return AttentionPlan.allocate(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=16,
            launches=AttentionLaunches(context=LAUNCH, generation=LAUNCH),
            device=torch.device("cpu"),
        )


@given(
    num_multiprocessors=st.integers(1, 200),
    num_kv_heads=st.integers(1, 40),
    group=st.integers(1, 8),
    num_generations=st.integers(1, 300),
    longest=st.integers(1, 10_000),
)
def test_split_generations_fit_into_the_room_for_them(
    num_multiprocessors: int, num_kv_heads: int, group: int, num_generations: int, longest: int
) -> None:
    num_heads = num_kv_heads * group
    plan = plan_for(num_multiprocessors, (num_heads, num_kv_heads))
    num_splits = plan.num_splits(num_generations, num_kv_heads, longest)
    assert 1 <= num_splits <= MAX_SPLITS
    assert (num_splits - 1) * LAUNCH.columns < longest
    if num_splits > 1:
        assert num_generations * num_heads * num_splits <= len(plan.sums) == len(plan.stats)
        assert num_generations * num_kv_heads * num_splits <= plan.wanted_programs


def test_few_generations_are_split_and_many_are_not() -> None:
    plan = plan_for(132, (32, 8))
    assert plan.num_splits(1, 8, 8192) == MAX_SPLITS
    assert plan.num_splits(8, 8, 8192) == 8
    assert plan.num_splits(1, 8, 100) == 4
    assert plan.num_splits(64, 8, 8192) == 1
