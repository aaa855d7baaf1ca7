"""What pausing costs in a KV cache too small: python -m tests.benchmarks.oversubscription

    [--requests 256] [--outputs 16 320]  tokens of an answer; what ends early has the same mean
    [--real]  the real model and measured time: two minutes, with fewer requests by default

Two traces whose running requests would need twice the KV blocks there are, through the real engine
under both policies: one where every answer reaches its max_tokens, and one where most end long
before, by an end id, which nobody can know in advance. A third row, "none", shows MAX_UTILIZATION
without its hysteresis: who fits now starts now, whatever comes of it.

Without --real the model is the arithmetic one and time is charged: FORWARD_SECONDS for each forward
and TOKEN_SECONDS for each token, so figures do not depend on this machine. "wall" is the real time
of the same run. "computed" is computed tokens per needed token (1.00 = nothing was computed twice),
"pauses" is per request.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol
from unittest.mock import patch

import numpy as np

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.batch import LlmRequest
from inflight.checkpoint import prepare_checkpoint
from inflight.engine.engine import Engine
from inflight.model.factory import load_runner
from inflight.model.runner import ForwardOutput, ModelRunner, PackedInputs, nothing_beside
from inflight.model.sampling import load_sampling_kernels
from inflight.scheduler import capacity
from tests.fakes.arithmetic_runner import VOCAB_SIZE, ArithmeticRunner

FORWARD_SECONDS, TOKEN_SECONDS = 0.008, 0.0004
MAX_BATCH_SIZE, MAX_NUM_TOKENS, MAX_SEQ_LEN = 32, 256, 8192
TOKENS_PER_BLOCK = 16
FLAT = 1000.0
"""A temperature at which the real model draws nearly any token: end ids come as by chance."""
PROMPT_LENGTHS = (16, 320)
OVER_SUBSCRIPTION = 2.0


class Model(Protocol):
    """What computes, and whose time counts."""

    vocab_size: int
    num_computed: int
    """Tokens, since ``engine``."""

    def engine(self, config: ExecutorConfig) -> Engine:
        """A new one, at time 0."""
        ...

    def now(self) -> float: ...


class ArithmeticModel:
    """A Model whose time is what its forwards are charged."""

    vocab_size = VOCAB_SIZE

    def engine(self, config: ExecutorConfig) -> Engine:
        self.num_computed, self._now = 0, 0.0
        return Engine(ArithmeticRunner(self._charge), config, clock=self.now)

    def now(self) -> float:
        return self._now

    def _charge(self, inputs: PackedInputs) -> None:
        self.num_computed += len(inputs.token_ids)
        self._now += FORWARD_SECONDS + TOKEN_SECONDS * len(inputs.token_ids)


class RealModel:
    """A Model that is computed here, in the time that it takes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._directory = prepare_checkpoint(arguments.model, "", progress=print).directory
        self._config = InflightConfig(dtype=arguments.dtype, max_seq_len=MAX_SEQ_LEN)
        self._kernels = load_sampling_kernels(self._config.cache_dir)
        self.vocab_size = self._runner().spec.vocab_size

    def engine(self, config: ExecutorConfig) -> Engine:
        runner = self._runner()
        forward = runner.forward

        def counted(
            inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
        ) -> ForwardOutput:
            self.num_computed += len(inputs.token_ids)
            return forward(inputs, launched)

        runner.forward = counted  # type: ignore[method-assign]
        self.num_computed, self._began = 0, time.monotonic()
        return Engine(runner, config, clock=self.now, sampling_kernels=self._kernels)

    def now(self) -> float:
        return time.monotonic() - self._began

    def _runner(self) -> ModelRunner:
        return load_runner(self._directory, self._config)


@dataclass
class Run:
    """One policy on the trace."""

    policy: CapacitySchedulerPolicy
    model: Model
    num_generated: int = 0
    num_pauses: int = 0
    seconds: float = 0.0
    """By the model's time."""
    wall_seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def execute(self, requests: Sequence[Request], num_blocks: int) -> None:
        engine = self.model.engine(self._config(num_blocks))
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
        self.seconds = self.model.now()
        self.wall_seconds = time.perf_counter() - began

    def _token(self, last_token: dict[int, float], request_id: int, num_tokens: int) -> None:
        now = self.model.now()
        self.num_generated += num_tokens
        if request_id in last_token:
            self.gaps.append(now - last_token[request_id])
        else:
            self.first_tokens.append(now)
        last_token[request_id] = now

    def _config(self, num_blocks: int) -> ExecutorConfig:
        return ExecutorConfig(
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=self.policy),
            kv_cache_config=KvCacheConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                num_blocks=num_blocks,
            ),
        )


@contextmanager
def no_hysteresis() -> Iterator[None]:
    """A request's horizon is its next token; otherwise it reaches some tokens further."""

    def to_the_next_token(request: LlmRequest) -> int:
        return min(request.num_tokens + 1, request.max_total_tokens)

    with patch.object(capacity, "_horizon", to_the_next_token):
        yield


def make_trace(arguments: argparse.Namespace, vocab_size: int, ends_early: bool) -> list[Request]:
    """Of what ends early, as many of the token ids end an answer as give the same mean length."""
    rng = random.Random(1)
    low, high = arguments.outputs
    num_end_ids = max(1, 2 * vocab_size // (low + high))
    sampling = SamplingConfig()
    if ends_early and arguments.real:
        sampling = SamplingConfig(temperature=FLAT)
    return [
        Request(
            input_token_ids=tuple(rng.randrange(900) for _ in range(rng.randint(*PROMPT_LENGTHS))),
            max_tokens=2 * high if ends_early else rng.randint(low, high),
            end_ids=tuple(range(num_end_ids)) if ends_early else (),
            streaming=True,
            sampling_config=replace(sampling, seed=number),
        )
        for number in range(arguments.requests)
    ]


def report(name: str, requests: Sequence[Request], run: Run, mean: float, remark: str = "") -> None:
    """Executes ``run``. ``mean``: tokens of an answer."""
    num_prompt = sum(len(request.input_token_ids) for request in requests)
    wanted = MAX_BATCH_SIZE * (num_prompt / len(requests) + mean) / TOKENS_PER_BLOCK
    run.execute(requests, int(wanted / OVER_SUBSCRIPTION))
    gaps = np.percentile(run.gaps, [50, 99]) * 1000
    first = np.percentile(run.first_tokens, [50, 99])
    # The last token of an answer is not computed.
    needed = num_prompt + run.num_generated - len(requests)
    print(
        f"{name:16}{run.policy.value + remark:21}{run.num_generated / run.seconds:9.0f}"
        f"{run.model.num_computed / needed:10.2f}{run.num_pauses / len(requests):8.2f}"
        f"{gaps[0]:9.0f}{gaps[1]:8.0f}{first[0]:10.1f}{first[1]:7.1f}{run.wall_seconds:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--real", action="store_true", help="the real model and measured time")
    parser.add_argument("--requests", type=int, help="default: 256, with --real 64")
    parser.add_argument("--outputs", type=int, nargs=2, help="default: 16 320, with --real 16 160")
    parser.add_argument("--dtype", default="auto", help="of the real model")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    arguments = parser.parse_args()
    arguments.requests = arguments.requests or (64 if arguments.real else 256)
    arguments.outputs = arguments.outputs or ((16, 160) if arguments.real else (16, 320))
    set_thread_defaults()
    model: Model = RealModel(arguments) if arguments.real else ArithmeticModel()
    print(
        f"{'trace':16}{'policy':21}{'tokens/s':>9}{'computed':>10}{'pauses':>8}"
        f"{'gap p50':>9}{'p99 ms':>8}{'TTFT p50':>10}{'p99 s':>7}{'wall s':>8}"
    )
    for ends_early in (False, True):
        requests = make_trace(arguments, model.vocab_size, ends_early)
        name, mean = "ends early" if ends_early else "full length", sum(arguments.outputs) / 2
        for policy in (
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            CapacitySchedulerPolicy.MAX_UTILIZATION,
        ):
            report(name, requests, Run(policy, model), mean)
        with no_hysteresis():
            report(name, requests, Run(policy, model), mean, ", none")


if __name__ == "__main__":
    main()
