from __future__ import annotations

import threading

from inflight.tritonserver import orphan


def test_the_process_ends_some_time_after_its_parent_has_changed() -> None:
    parents = iter([50, 50, 50, 1])
    slept: list[float] = []
    exited_after: list[list[float]] = []
    orphan.watch(
        lambda: next(parents), lambda code: exited_after.append([code, *slept]), slept.append
    )
    assert exited_after == [
        [orphan.EXIT_CODE, orphan.PERIOD_SECONDS, orphan.PERIOD_SECONDS, orphan.GRACE_SECONDS]
    ]


def test_a_process_has_one_watch() -> None:
    def watches() -> int:
        return sum(thread.name == "inflight-orphan-watch" for thread in threading.enumerate())

    orphan.exit_when_orphaned()
    orphan.exit_when_orphaned()
    assert watches() == 1
