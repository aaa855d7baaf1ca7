from __future__ import annotations

from inflight.cli.restarts import RestartBudget, RestartPolicy

POLICY = RestartPolicy(
    most_quick_failures=4, stable_seconds=60, first_delay_seconds=1, longest_delay_seconds=3
)


def test_the_wait_doubles_up_to_a_limit_and_then_it_gives_up() -> None:
    budget = RestartBudget(POLICY)
    delays = [budget.delay_after_failure(ready_seconds=1) for _ in range(5)]
    assert delays == [1, 2, 3, 3, None]


def test_a_server_that_lived_long_starts_the_count_again() -> None:
    budget = RestartBudget(POLICY)
    for _ in range(4):
        budget.delay_after_failure(ready_seconds=0)
    assert budget.delay_after_failure(ready_seconds=60) == 1


def test_disabled_it_never_restarts() -> None:
    budget = RestartBudget(RestartPolicy(enabled=False))
    assert budget.delay_after_failure(ready_seconds=1e6) is None
