"""What pausing costs in a KV cache too small: python -m tests.benchmarks.oversubscription

    [--requests 256] [--outputs 16 320]  tokens of an answer; what ends early has the same mean

Two traces whose running requests would need twice the KV blocks there are, through the real engine
with the arithmetic model, under both policies: one where every answer reaches its max_tokens, and
one where most end long before, by an end id, which nobody can know in advance. A third row, "none",
shows MAX_UTILIZATION without its hysteresis: who fits now starts now, whatever comes of it.

Time is a model's: each forward is charged FORWARD_SECONDS and each token TOKEN_SECONDS, so figures
do not depend on this machine; "wall" is the real time of the same run. "computed" is computed
tokens per needed token (1.00 = nothing was computed twice), "pauses" is per request.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SchedulerConfig,
)
from inflight.batch import LlmRequest
from inflight.engine.engine import Engine
from inflight.model.runner import PackedInputs
from inflight.scheduler import capacity
from tests.fakes.arithmetic_runner import VOCAB_SIZE, ArithmeticRunner

FORWARD_SECONDS, TOKEN_SECONDS = 0.008, 0.0004
MAX_BATCH_SIZE, MAX_NUM_TOKENS = 32, 256
TOKENS_PER_BLOCK = 16
PROMPT_LENGTHS = (16, 320)
OVER_SUBSCRIPTION = 2.0


@dataclass
class Run:
    """One policy on the trace. The clock is the model's."""

    policy: CapacitySchedulerPolicy
    now: float = 0.0
    num_computed: int = 0
    num_generated: int = 0
    num_pauses: int = 0
    wall_seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def execute(self, requests: Sequence[Request], num_blocks: int) -> None:
        engine = self._engine(num_blocks)
        last_token: dict[int, float] = {}
        for request in requests:
            engine.enqueue(engine.next_id(), request)
        began = time.perf_counter()
        while engine.loop.has_work:
            engine.loop.step()
            for response in engine.outbox.take(None, 0):
                assert response.result is not None
                num_tokens = len(response.result.output_token_ids)
                if num_tokens:
                    self._token(last_token, response.request_id, num_tokens)
                if response.is_final:
                    perf = response.result.perf_metrics
                    assert perf is not None
                    self.num_pauses += perf.num_pauses
        self.wall_seconds = time.perf_counter() - began

    def _token(self, last_token: dict[int, float], request_id: int, num_tokens: int) -> None:
        self.num_generated += num_tokens
        if request_id in last_token:
            self.gaps.append(self.now - last_token[request_id])
        else:
            self.first_tokens.append(self.now)
        last_token[request_id] = self.now

    def _engine(self, num_blocks: int) -> Engine:
        config = ExecutorConfig(
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            max_seq_len=8192,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=self.policy),
            kv_cache_config=KvCacheConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                num_blocks=num_blocks,
            ),
        )
        return Engine(ArithmeticRunner(self._charge), config, clock=lambda: self.now)

    def _charge(self, inputs: PackedInputs) -> None:
        self.num_computed += len(inputs.token_ids)
        self.now += FORWARD_SECONDS + TOKEN_SECONDS * len(inputs.token_ids)


@contextmanager
def no_hysteresis() -> Iterator[None]:
    """A request's horizon is its next token; otherwise it reaches some tokens further."""

    def to_the_next_token(request: LlmRequest) -> int:
        return min(request.num_tokens + 1, request.max_total_tokens)

    with patch.object(capacity, "_horizon", to_the_next_token):
        yield


def make_trace(arguments: argparse.Namespace, ends_early: bool) -> list[Request]:
    """Of what ends early, as many of the token ids end an answer as give the same mean length."""
    rng = random.Random(1)
    low, high = arguments.outputs
    num_end_ids = max(1, 2 * VOCAB_SIZE // (low + high))
    return [
        Request(
            input_token_ids=tuple(rng.randrange(900) for _ in range(rng.randint(*PROMPT_LENGTHS))),
            max_tokens=2 * high if ends_early else rng.randint(low, high),
            end_ids=tuple(range(num_end_ids)) if ends_early else (),
            streaming=True,
        )
        for _ in range(arguments.requests)
    ]


def report(
    name: str,
    requests: Sequence[Request],
    policy: CapacitySchedulerPolicy,
    mean: float,
    remark: str = "",
) -> None:
    """``mean``: tokens of an answer."""
    num_prompt = sum(len(request.input_token_ids) for request in requests)
    wanted = MAX_BATCH_SIZE * (num_prompt / len(requests) + mean) / TOKENS_PER_BLOCK
    num_blocks = int(wanted / OVER_SUBSCRIPTION)
    run = Run(policy)
    run.execute(requests, num_blocks)
    gaps = np.percentile(run.gaps, [50, 99]) * 1000
    first = np.percentile(run.first_tokens, [50, 99])
    # The last token of an answer is not computed.
    needed = num_prompt + run.num_generated - len(requests)
    print(
        f"{name:16}{policy.value + remark:21}{run.num_generated / run.now:9.0f}"
        f"{run.num_computed / needed:10.2f}{run.num_pauses / len(requests):8.2f}"
        f"{gaps[0]:9.0f}{gaps[1]:8.0f}{first[0]:10.1f}{first[1]:7.1f}{run.wall_seconds:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--outputs", type=int, nargs=2, default=(16, 320))
    arguments = parser.parse_args()
    print(
        f"{'trace':16}{'policy':21}{'tokens/s':>9}{'computed':>10}{'pauses':>8}"
        f"{'gap p50':>9}{'p99 ms':>8}{'TTFT p50':>10}{'p99 s':>7}{'wall s':>8}"
    )
    for ends_early in (False, True):
        requests = make_trace(arguments, ends_early)
        for policy in (
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            CapacitySchedulerPolicy.MAX_UTILIZATION,
        ):
            name = "ends early" if ends_early else "full length"
            report(name, requests, policy, sum(arguments.outputs) / 2)
        with no_hysteresis():
            report(name, requests, policy, sum(arguments.outputs) / 2, ", none")


if __name__ == "__main__":
    main()
