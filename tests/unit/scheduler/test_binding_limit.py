"""What a plan says about why it does no more."""

from __future__ import annotations

import pytest

from inflight.api import CapacitySchedulerPolicy as Policy
from inflight.api.stats import BindingLimit
from tests.fakes.fake_capacity import FakeCapacity
from tests.unit.scheduler.simulated_engine import SimulatedEngine, make_request, make_scheduler

NO_EVICT = Policy.GUARANTEED_NO_EVICT


def engine(
    policy: Policy = NO_EVICT, *, rows: int = 8, tokens: int = 64, blocks: int = 64
) -> SimulatedEngine:
    scheduler = make_scheduler(policy, max_batch_size=rows, max_num_tokens=tokens)
    return SimulatedEngine(scheduler, FakeCapacity(num_blocks=blocks, tokens_per_block=4))


def ask(engine: SimulatedEngine, *lengths: int, max_tokens: int = 4) -> None:
    """A request for each length; the tokens of no two begin alike."""
    for index, length in enumerate(lengths):
        prompt = [100 * index + position for position in range(length)]
        engine.waiting.push(make_request(index + 1, prompt, max_tokens))


@pytest.mark.parametrize("policy", Policy)
def test_queue_while_everybody_gets_all_they_want(policy: Policy) -> None:
    simulated = engine(policy)
    ask(simulated, 6, 6)
    assert [simulated.step().binding_limit for _ in range(3)] == [BindingLimit.QUEUE] * 3


def test_rows_while_requests_wait_for_one_to_end() -> None:
    simulated = engine(rows=2)
    ask(simulated, 6, 6, 6)
    limits = [simulated.step().binding_limit for _ in range(5)]
    assert limits == [BindingLimit.ROWS] * 4 + [BindingLimit.QUEUE]


def test_tokens_while_a_context_is_cut_or_left_out() -> None:
    simulated = engine(tokens=16)
    ask(simulated, 40)
    limits = [simulated.step().binding_limit for _ in range(4)]
    assert limits == [BindingLimit.TOKENS] * 2 + [BindingLimit.QUEUE] * 2
    simulated = engine(tokens=16)
    ask(simulated, 16, 16)
    assert simulated.step().binding_limit is BindingLimit.TOKENS, "the second gets none"


def test_blocks_while_a_request_that_has_a_row_does_not_fit() -> None:
    simulated = engine(blocks=5)
    ask(simulated, 8, 8)  # of three blocks each
    assert simulated.step().binding_limit is BindingLimit.BLOCKS


def test_blocks_in_the_iteration_that_pauses() -> None:
    simulated = engine(Policy.MAX_UTILIZATION, blocks=22)
    ask(simulated, 8, 8, max_tokens=60)
    plans = [simulated.step() for _ in range(50)]
    paused = [plan for plan in plans if plan.paused]
    assert paused and {plan.binding_limit for plan in paused} == {BindingLimit.BLOCKS}


def test_a_static_batch_that_drains_has_no_rows_for_others() -> None:
    simulated = engine(Policy.STATIC_BATCH, rows=4)
    ask(simulated, 6, 6)
    simulated.step()
    simulated.waiting.push(make_request(9, [900, 901], 2))
    assert simulated.step().binding_limit is BindingLimit.ROWS
