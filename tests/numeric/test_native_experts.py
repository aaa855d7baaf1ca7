"""Routing, the linears of groups and the weighted sum: native and torch against what is written out
row by row here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.native.experts import ExpertOps, LinearGroup, NativeExperts, Routing, TorchExperts
from inflight.native.linear import LinearOps, NativeLinear, TorchLinear
from inflight.native.packed import WeightKind, pack_gate_up, pack_linear
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric

Ops = tuple[ExpertOps, LinearOps]


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchExperts(TorchLinear()), TorchLinear()
    return NativeExperts(native_library()), NativeLinear(native_library())


def routed(
    experts: ExpertOps, logits: Tensor, num_chosen: int, num_shared: int = 0, **options: Any
) -> Routing:
    routing = Routing.allocate(
        len(logits) + 3,
        num_experts=logits.shape[1] - num_shared,
        num_chosen=num_chosen,
        num_shared=num_shared,
    ).first(len(logits))
    experts.route(logits, routing, **({"is_softmax_of_chosen": False} | options))
    return routing


def experts_of(routing: Routing) -> Tensor:
    """int64[T, k]: the experts of each token, by where its results are."""
    places = routing.places[:, : routing.num_chosen].contiguous()
    return torch.searchsorted(routing.ends, places, right=True)


def random_logits(num_rows: int, width: int) -> Tensor:
    return 3 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 700])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 1), (4, 4), (60, 4), (128, 8)])
def test_tokens_go_to_the_experts_of_their_largest_logits(
    num_rows: int, num_experts: int, num_chosen: int, ops: Ops
) -> None:
    logits = random_logits(num_rows, num_experts)
    routing = routed(ops[0], logits, num_chosen)
    best = logits.topk(num_chosen)
    assert torch.equal(experts_of(routing), best.indices)
    torch.testing.assert_close(routing.weights, logits.softmax(-1).gather(1, best.indices))
    of_chosen = routed(ops[0], logits, num_chosen, is_softmax_of_chosen=True)
    assert torch.equal(of_chosen.places, routing.places)
    torch.testing.assert_close(of_chosen.weights, best.values.softmax(-1))


@pytest.mark.parametrize("num_shared", [0, 1])
def test_results_lie_together_by_expert_and_in_the_order_of_tokens(
    num_shared: int, ops: Ops
) -> None:
    num_rows, num_chosen = 50, 3
    logits = random_logits(num_rows, 9 + num_shared)
    routing = routed(ops[0], logits, num_chosen, num_shared)
    num_expert_rows = num_rows * num_chosen
    assert int(routing.ends[-1]) == num_expert_rows
    assert sorted(routing.places.flatten().tolist()) == list(
        range(num_expert_rows + num_shared * num_rows)
    )
    own_rows = routing.places[:, :num_chosen]
    assert torch.equal(routing.tokens[own_rows], torch.arange(num_rows)[:, None].expand(-1, 3))
    start = 0
    for end in routing.ends.tolist():
        tokens = routing.tokens[start:end].tolist()
        assert tokens == sorted(set(tokens))
        start = end
    if num_shared:
        assert routing.places[:, -1].tolist() == list(range(150, 200))
        torch.testing.assert_close(routing.weights[:, -1], logits[:, -1].sigmoid())


def test_of_equal_logits_the_lower_expert_comes_first(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert experts_of(routed(ops[0], logits, 2)).tolist() == [[1, 2], [0, 1]]


def test_logits_that_are_no_numbers_spoil_their_own_row_alone(ops: Ops) -> None:
    logits = random_logits(3, 6)
    expected = routed(ops[0], logits, 2)
    for bad in ([torch.nan] * 6, [torch.inf, torch.inf, *[0.0] * 4], [-torch.inf] * 6):
        spoiled = logits.clone()
        spoiled[1] = torch.tensor(bad)
        routing = routed(ops[0], spoiled, 2)
        assert all(len(set(row)) == 2 for row in experts_of(routing).tolist())
        assert routing.weights[1].isnan().all()
        assert torch.equal(routing.weights[[0, 2]], expected.weights[[0, 2]])


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_1"])
def test_each_group_of_rows_has_its_own_weights(kind: WeightKind, ops: Ops) -> None:
    """Exactly what the linear gives that would be called for the group by itself."""
    experts, linear = ops
    ends = torch.tensor([3, 3, 4, 12, 12])
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(5, 48, 64, generator=generator)
    ups = torch.randn(5, 48, 64, generator=generator)
    x = torch.randn(12, 64, generator=generator)
    group = LinearGroup(tuple(pack_linear(w, None, kind) for w in weights))
    gates = LinearGroup(
        tuple(pack_gate_up(w, up, kind) for w, up in zip(weights, ups, strict=True))
    )
    out, gated = torch.full((12, 48), torch.nan), torch.full((12, 48), torch.nan)
    experts.linears(x, group, ends, out)
    experts.gate_ups(x, gates, ends, gated, "silu")
    expected, expected_gated = torch.empty(12, 48), torch.empty(12, 48)
    for i, rows in ((0, slice(0, 3)), (2, slice(3, 4)), (3, slice(4, 12))):
        linear(x[rows], group.members[i], expected[rows])
        linear.gate_up(x[rows], gates.members[i], expected_gated[rows], "silu")
    assert torch.equal(out, expected) and torch.equal(gated, expected_gated)


def test_weights_without_rows_are_not_read() -> None:
    """The second member has no memory at all: reading it would end the process."""
    experts = NativeExperts(native_library())
    weights = torch.randn(2, 32, 32)
    group = LinearGroup(tuple(pack_linear(w, None, "f32") for w in weights))
    group.addresses[1] = 0
    x, out = torch.randn(4, 32), torch.empty(4, 32)
    experts.linears(x, group, torch.tensor([4, 4]), out)
    torch.testing.assert_close(out, x @ weights[0].T)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 90])
def test_results_are_added_up_by_their_weights(num_rows: int, accumulate: bool, ops: Ops) -> None:
    experts, _ = ops
    routing = routed(experts, random_logits(num_rows, 7), 3, 1)
    results = random_logits(num_rows * 4, 80)
    start = random_logits(num_rows, 80)
    out = start.clone()
    experts.combine(results, routing, out, accumulate=accumulate)
    for row in range(num_rows):
        expected = routing.weights[row] @ results[routing.places[row]]
        if accumulate:
            expected += start[row]
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
