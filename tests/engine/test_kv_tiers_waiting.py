"""Requests that wait for a disk: for how long, and who goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from inflight.api import Request
from inflight.engine.engine import Engine
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.tiers.cascade import Place
from inflight.kv_cache.tiers.loading import Load
from inflight.kv_cache.tiers.storage import TierBlock
from tests.engine.tiered_engine import (
    PROMPTS,
    always_onboard,
    ask,
    engine_with,
    onboarded,
    onboarding,
    one_round,
)


class SlowDisk:
    """Stands in for ``DiskStorage.get``: nothing comes for as long as anybody waits."""

    def __init__(self, engine: Engine) -> None:
        assert engine.onboarder is not None and engine.onboarder.tiers.cascade.disk is not None
        self.is_read = False
        engine.onboarder.tiers.cascade.disk.get = self.get  # type: ignore[method-assign]

    def get(self, key: object) -> None:
        self.is_read = True
        time.sleep(1.0)


def test_a_slow_disk_holds_up_one_request_for_as_long_as_computing_takes(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        assert engine.onboarder is not None
        cost = engine.onboarder.tiers.cost
        for _ in range(50):
            # The model computes 20 tokens in 0.1 s, and the disk seems to be much faster.
            type(cost.context).observe(cost.context, 200, 1.0)
            cost.bandwidth[Place.DISK].observe(10**9, 1.0)
        disk = SlowDisk(engine)
        ask(engine, [PROMPTS[0]])
        assert disk.is_read and onboarding(engine).late_loads == 1
        ask(engine, [PROMPTS[5]])


def test_others_go_on_while_one_waits_for_the_disk(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        SlowDisk(engine)
        waiting, running = engine.next_id(), engine.next_id()
        engine.enqueue(waiting, Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=1))
        engine.enqueue(running, Request(input_token_ids=(7, 8, 9), max_tokens=2))
        finished = []
        while len(finished) < 2:
            engine.loop.step()
            finished += [response.request_id for response in engine.outbox.take(None, 0)]
        assert finished == [running, waiting]


class BusyQueue:
    """A client that asks again, something new, as soon as it is answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_answers = -1
        self.request_id = 0
        self.heard_of({0})

    def heard_of(self, finished: Collection[int]) -> None:
        if self.request_id not in finished:
            return
        self.num_answers += 1
        self.request_id = self._engine.next_id()
        prompt = (7, 8, self.request_id)
        self._engine.enqueue(self.request_id, Request(input_token_ids=prompt, max_tokens=8))


def step_busy(engine: Engine, clients: Sequence[BusyQueue]) -> set[int]:
    """An iteration; the requests that it ended."""
    engine.loop.step()
    finished = {each.request_id for each in engine.outbox.take(None, 0) if each.is_final}
    for client in clients:
        client.heard_of(finished)
    return finished


class GatedDisk:
    """Stands in for ``DiskStorage.get``: blocks come once the gate is open."""

    def __init__(self, engine: Engine) -> None:
        assert engine.onboarder is not None
        cascade = engine.onboarder.tiers.cascade
        assert cascade.disk is not None
        self.gate = threading.Event()
        self.loads: list[Load] = []
        self._get, self._load = cascade.disk.get, cascade.load
        cascade.disk.get = self.get  # type: ignore[method-assign]
        cascade.load = self.load  # type: ignore[method-assign]

    def get(self, key: BlockKey) -> TierBlock | None:
        assert self.gate.wait(10)
        return self._get(key)

    def load(self, keys: Sequence[BlockKey], now: float) -> Load:
        self.loads.append(self._load(keys, now))
        return self.loads[-1]


def test_a_request_from_the_disk_gets_its_turn_in_a_busy_queue(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path, max_batch_size=2, num_blocks=24) as engine:
        always_onboard(engine)
        one_round(engine)
        one_round(engine)
        assert engine.onboarder is not None
        before, disk = onboarded(engine, "disk"), GatedDisk(engine)
        busy = [BusyQueue(engine) for _ in range(4)]
        request_id = engine.next_id()
        engine.enqueue(request_id, Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=1))
        busy += [BusyQueue(engine) for _ in range(4)]
        while sum(each.num_answers for each in busy) < 30:
            assert request_id not in step_busy(engine, busy)
        disk.gate.set()
        engine.onboarder.tiers.cascade.wait_for_any(disk.loads, 10)
        for _ in range(20):
            if request_id in step_busy(engine, busy):
                break
        else:
            pytest.fail("its blocks were there and it did not start")
        assert len(disk.loads) == 1 and onboarded(engine, "disk") == before + 5


def test_a_cancelled_request_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        one_round(engine)
        SlowDisk(engine)
        request_id = engine.next_id()
        engine.enqueue(request_id, Request(input_token_ids=tuple(PROMPTS[0]), max_tokens=1))
        engine.loop.step()
        assert engine.onboarder is not None and engine.onboarder.tiers.is_loading
        engine.inbox.cancel(request_id)
        engine.loop.step()
        assert not engine.loop.has_work and not engine.onboarder.tiers.is_loading
