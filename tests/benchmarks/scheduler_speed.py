"""Microseconds per iteration of the scheduler alone: python tests/benchmarks/scheduler_speed.py

A pool of 100,000 blocks and 8, 64 or 256 started requests, under each policy. "generation": all
are in the generation phase and nobody waits. "full queue": as many requests again wait, there are
slots for them, and the first does not fit. "contexts": nobody has started and as many wait. Each
figure is the median of many passes. Timed figures are printed, never asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api import CapacitySchedulerPolicy, Request, SchedulerConfig
from inflight.api.kv_pools import most_blocks
from inflight.batch import LlmRequest
from inflight.scheduler import PrefixMatch, Scheduler, WaitingQueue

NUM_BLOCKS, TOKENS_PER_BLOCK = 100_000, 32
PROMPT_LENGTH, MAX_TOKENS = 500, 500
SECONDS_PER_FIGURE = 0.5


class CountedCapacity:
    """A KvCapacity of plain counters, so that the figure is the scheduler's own time."""

    num_blocks = NUM_BLOCKS
    tokens_per_block = TOKENS_PER_BLOCK

    def __init__(self, started: Sequence[LlmRequest], num_free_blocks: int) -> None:
        self.num_free_blocks = num_free_blocks
        self._held = {r.request_id: -(-r.num_tokens // TOKENS_PER_BLOCK) for r in started}

    @property
    def pools(self) -> tuple[CountedCapacity]:
        return (self,)

    def num_kept_blocks(self, request_id: int) -> int:
        return self._held.get(request_id, 0)

    def num_new_blocks(self, request_id: int, end: int) -> int:
        return -(-end // TOKENS_PER_BLOCK) - self._held.get(request_id, 0)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        return most_blocks(num_tokens, None, chunk=chunk, tokens_per_block=TOKENS_PER_BLOCK)

    def num_promisable_blocks(self, request_ids: Iterable[int]) -> int:
        return self.num_free_blocks + sum(self._held.get(i, 0) for i in request_ids)

    def num_releasable_blocks(self, request_id: int) -> int:
        return self._held.get(request_id, 0)

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        return None

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        return PrefixMatch(0, 0)


def make_requests(first_id: int, count: int) -> list[LlmRequest]:
    prompt = tuple(range(PROMPT_LENGTH))
    return [
        LlmRequest(
            request_id,
            Request(input_token_ids=prompt, max_tokens=MAX_TOKENS),
            arrival_time=float(request_id),
            rank=float(request_id),
            end_ids=(),
            seed=0,
        )
        for request_id in range(first_id, first_id + count)
    ]


def in_generation(count: int) -> list[LlmRequest]:
    requests = make_requests(0, count)
    for index, request in enumerate(requests):
        request.advance(0, PROMPT_LENGTH)
        for token in range(1 + index % 30):
            if token:
                request.advance(request.context_position, 1)
            request.append(token)
    return requests


def microseconds(
    policy: CapacitySchedulerPolicy,
    num_active: int,
    started: Sequence[LlmRequest],
    waiting: Collection[LlmRequest],
    num_free_blocks: int,
) -> float:
    scheduler = Scheduler(
        SchedulerConfig(capacity_scheduler_policy=policy),
        max_batch_size=2 * num_active,
        max_num_tokens=2048,
        enable_chunked_context=True,
    )
    kv = CountedCapacity(started, num_free_blocks)
    samples = []
    end = time.perf_counter() + SECONDS_PER_FIGURE
    while time.perf_counter() < end:
        begin = time.perf_counter()
        scheduler.schedule(0, started, waiting, kv)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(f"{'policy':22}{'active':>7}{'generation':>12}{'full queue':>12}{'contexts':>10}   us")
    for policy in CapacitySchedulerPolicy:
        for num_active in (8, 64, 256):
            started = in_generation(num_active)
            queue = WaitingQueue()
            for request in make_requests(num_active, num_active):
                queue.push(request)
            figures = (
                microseconds(policy, num_active, started, (), NUM_BLOCKS - 16 * num_active),
                microseconds(policy, num_active, started, queue, num_active),
                microseconds(policy, num_active, (), queue, NUM_BLOCKS),
            )
            generation, full_queue, contexts = figures
            print(
                f"{policy.value:22}{num_active:7}"
                f"{generation:12.1f}{full_queue:12.1f}{contexts:10.1f}"
            )


if __name__ == "__main__":
    main()
