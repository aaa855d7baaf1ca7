from __future__ import annotations

import random

import pytest

from inflight.scheduler import WaitingQueue, rank_key, rank_of
from tests.unit.scheduler.simulated_engine import make_request


def test_priority_counts_as_earlier_arrival() -> None:
    assert rank_of(100.0, 0.0, 60.0) == 100.0
    assert rank_of(100.0, 0.5, 60.0) == 70.0
    assert rank_of(100.0, 1.0, 10.0) == 90.0


def test_equal_priorities_are_first_come_first_served() -> None:
    assert rank_of(1.0, 0.3, 60.0) < rank_of(1.5, 0.3, 60.0)


def test_nobody_overtakes_who_arrives_after_the_aging_time() -> None:
    lowest = rank_of(0.0, 0.0, 60.0)
    assert rank_of(59.0, 1.0, 60.0) < lowest < rank_of(61.0, 1.0, 60.0)


def test_iterates_in_rank_order_whatever_the_order_of_pushes() -> None:
    requests = [
        make_request(1, 4, priority=0.2, arrival_time=1.0),
        make_request(2, 4, priority=0.9, arrival_time=5.0),
        make_request(3, 4, priority=0.2, arrival_time=0.0),
        make_request(4, 4, priority=0.2, arrival_time=0.0),
    ]
    queue = WaitingQueue()
    for request in (requests[i] for i in (3, 0, 2, 1)):
        queue.push(request)
    assert [request.request_id for request in queue] == [2, 3, 4, 1]
    assert len(queue) == 4, "iteration takes nothing out"


def test_a_request_that_is_pushed_back_gets_its_old_place() -> None:
    first, second, third = (make_request(i, 4, arrival_time=float(i)) for i in (1, 2, 3))
    queue = WaitingQueue()
    for request in (first, second, third):
        queue.push(request)
    queue.remove(second)
    assert second not in queue
    assert list(queue) == [first, third]
    queue.push(second)
    assert list(queue) == [first, second, third]


def test_a_request_is_in_the_queue_once() -> None:
    queue = WaitingQueue()
    request = make_request(1, 4)
    queue.push(request)
    with pytest.raises(AssertionError):
        queue.push(request)
    queue.remove(request)
    with pytest.raises(KeyError):
        queue.remove(request)
    assert len(queue) == 0


def test_keeps_order_through_many_pushes_and_removals() -> None:
    shuffled = random.Random(7)
    requests = [
        make_request(i, 1, priority=shuffled.choice([0.0, 0.5, 1.0]), arrival_time=float(i % 50))
        for i in range(500)
    ]
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    gone = shuffled.sample(requests, 250)
    for request in gone:
        queue.remove(request)
    left = [request for request in requests if request not in gone]
    assert list(queue) == sorted(left, key=rank_key)
