"""A working set three times the primary KV pool: hit rate and TTFT with and without tiers.

    python tests/benchmarks/kv_tiers.py [--prompts 12] [--length 512] [--rounds 3] [--iterations]

Each prompt is asked again and again, one after the other, in a pool that holds a third of them:
the worst case for an LRU cache, which without tiers never hits. Host memory alone holds everything;
with the disk it holds a third, and the disk the rest. A persisted disk is then asked by a new
engine.

With --iterations it is measured instead what offloading costs those who run: two engines take turns
with the same streams of new prompts, in pools where nearly every block that is taken evicts one.
One has host memory, which is full soon and gives up as much as it gets; the other has no tier.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inflight.api import ExecutorConfig, KvCacheConfig, KvTiersConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.api.stats import KvCacheStats
from inflight.checkpoint import prepare_checkpoint
from inflight.engine.engine import Engine
from inflight.executor import Executor
from inflight.model.factory import load_runner
from inflight.model.runner import ModelRunner

VOCABULARY = 40_000
TOKENS_PER_BLOCK = 32
SHARE_OF_POOL = 3
STREAMS, MOST_GENERATED = 8, 96
"""With --iterations."""
FILLING_ROUNDS = 4
"""Until pool and tier are full; memory that is touched for the first time takes longer."""


@dataclass
class Outcome:
    first_tokens: list[float]
    """Seconds to the first token of each request after the first round."""
    hit_rate: float
    kv: KvCacheStats
    """At the end."""


def load(arguments: argparse.Namespace) -> tuple[ModelRunner, str]:
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    return load_runner(directory, InflightConfig(dtype=arguments.dtype)), str(directory)


def make_executor(arguments: argparse.Namespace, tiers: KvTiersConfig) -> Executor:
    runner, identity = load(arguments)
    blocks = arguments.prompts * -(-arguments.length // TOKENS_PER_BLOCK)
    config = ExecutorConfig(
        max_batch_size=4,
        max_seq_len=arguments.length + 16,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=blocks // SHARE_OF_POOL, tiers=tiers
        ),
    )
    return Executor(runner, config, model_identity=identity)


def ask(executor: Executor, prompt: list[int]) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    executor.enqueue_request(
        Request(input_token_ids=tuple(prompt), max_tokens=2, end_ids=(), streaming=True)
    )
    first = None
    while True:
        for response in executor.await_responses():
            assert response.error is None, response.error
            first = first or time.perf_counter() - began
            if response.is_final:
                return first


def run(executor: Executor, prompts: list[list[int]], rounds: int, *, warm: bool) -> Outcome:
    """``warm``: the first round counts as well."""
    if not warm:
        for prompt in prompts:
            ask(executor, prompt)
    before = executor.kv_cache_stats()
    first_tokens = [ask(executor, prompt) for _ in range(rounds) for prompt in prompts]
    after = executor.kv_cache_stats()
    reused = after.reused_blocks - before.reused_blocks
    looked_up = reused + after.missed_blocks - before.missed_blocks
    executor.shutdown()
    return Outcome(first_tokens, reused / looked_up, after)


def report(name: str, outcome: Outcome, base: Outcome) -> None:
    median = statistics.median(outcome.first_tokens)
    ratio = statistics.median(base.first_tokens) / median
    print(
        f"{name:14} hit rate {outcome.hit_rate:.3f}, TTFT median {median * 1000:7.1f} ms, "
        f"slowest {max(outcome.first_tokens) * 1000:7.1f} ms, {ratio:5.2f}x as fast as without"
    )
    for tier in outcome.kv.tiers:
        print(
            f"{'':14} {tier.tier}: offloaded {tier.offloaded_bytes >> 20} MiB, onboarded "
            f"{tier.onboarded_bytes >> 20} MiB, dropped {tier.dropped_blocks} blocks"
        )
    onboarding = outcome.kv.onboarding
    if onboarding is None:
        return
    rates = (onboarding.host_bytes_per_second, onboarding.disk_bytes_per_second)
    host, disk = ("-" if rate is None else f"{rate / 1e9:.2f} GB/s" for rate in rates)
    print(
        f"{'':14} computed instead {onboarding.recompute_decisions}, late {onboarding.late_loads}; "
        f"host {host}, disk {disk}, "
        f"context {onboarding.context_tokens_per_second or 0.0:.0f} tokens/s"
    )


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    draw = random.Random(3)
    prompts = [
        [draw.randrange(100, VOCABULARY) for _ in range(arguments.length)]
        for _ in range(arguments.prompts)
    ]
    runner, _ = load(arguments)
    blocks = arguments.prompts * -(-arguments.length // TOKENS_PER_BLOCK)
    everything = 2 * blocks * TOKENS_PER_BLOCK * runner.spec.kv_bytes_per_token
    third = everything // 2 // SHARE_OF_POOL
    disk = KvTiersConfig(
        host_memory_bytes=third,
        disk_bytes=everything,
        disk_path=str(folder),
        disk_persist=True,
    )
    settings = {
        "none": KvTiersConfig(),
        "host": KvTiersConfig(host_memory_bytes=everything),
        "host + disk": disk,
        "after restart": disk,
    }
    base: Outcome | None = None
    for name, tiers in settings.items():
        executor = make_executor(arguments, tiers)
        outcome = run(executor, prompts, arguments.rounds, warm=name == "after restart")
        base = base or outcome
        report(name, outcome, base)


class PressedEngine:
    """Its pool has room for its streams and nothing else, so whatever they take evicts a block."""

    def __init__(self, arguments: argparse.Namespace, pools_in_host: int) -> None:
        """``pools_in_host``: host memory, in sizes of the pool."""
        runner, identity = load(arguments)
        longest = 2 * arguments.length + MOST_GENERATED
        num_blocks = STREAMS * -(-longest // TOKENS_PER_BLOCK)
        pool_bytes = num_blocks * TOKENS_PER_BLOCK * runner.spec.kv_bytes_per_token
        config = ExecutorConfig(
            max_batch_size=STREAMS,
            max_seq_len=longest,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                num_blocks=num_blocks,
                tiers=KvTiersConfig(host_memory_bytes=pools_in_host * pool_bytes),
            ),
        )
        self._engine = Engine(runner, config, model_identity=identity)
        self.iterations: list[float] = []
        """Seconds of each."""
        self.copying: list[float] = []
        """What of them blocks took on their way into host memory."""
        self.num_evicted = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int], *, counts: bool) -> None:
        """All prompts at once, to their ends; ``counts`` False: to fill the pool and the tier."""
        engine = self._engine
        for prompt, most in zip(prompts, max_tokens, strict=True):
            request = Request(input_token_ids=tuple(prompt), max_tokens=most, end_ids=())
            engine.enqueue(engine.next_id(), request)
        evicted = engine.kv.stats().evicted_blocks
        while engine.loop.has_work:
            moving, began = self._moving_seconds(), time.perf_counter()
            engine.loop.step()
            seconds = time.perf_counter() - began
            if counts:
                self.iterations.append(seconds)
                self.copying.append(self._moving_seconds() - moving)
        assert all(response.error is None for response in engine.outbox.take(None, 0))
        if counts:
            self.num_evicted += engine.kv.stats().evicted_blocks - evicted

    def _moving_seconds(self) -> float:
        onboarder = self._engine.onboarder
        return 0.0 if onboarder is None else onboarder.tiers.moving_seconds

    def report(self, name: str) -> None:
        p50, p99 = np.percentile(self.iterations, [50, 99]) * 1000
        copied_p99 = np.percentile(self.copying, 99) * 1000
        print(
            f"{name:8} {len(self.iterations)} iterations: p50 {p50:6.2f} ms, p99 {p99:7.2f} ms, "
            f"mean {statistics.mean(self.iterations) * 1000:6.2f} ms; {self.num_evicted} blocks "
            f"evicted, copying {sum(self.copying) / sum(self.iterations):.2%} of the time, "
            f"p99 {copied_p99:.2f} ms of an iteration"
        )


def measure_iterations(arguments: argparse.Namespace) -> None:
    draw, length = random.Random(5), arguments.length
    engines = {"none": PressedEngine(arguments, 0), "host": PressedEngine(arguments, 1)}
    for number in range(FILLING_ROUNDS + arguments.rounds):
        lengths = [draw.randint(length // 2, 2 * length) for _ in range(STREAMS)]
        prompts = [[draw.randrange(100, VOCABULARY) for _ in range(n)] for n in lengths]
        max_tokens = [draw.randint(MOST_GENERATED // 2, MOST_GENERATED) for _ in range(STREAMS)]
        in_turns = list(engines.values())
        for engine in in_turns if number % 2 else in_turns[::-1]:
            engine.run(prompts, max_tokens, counts=number >= FILLING_ROUNDS)
    for name, each in engines.items():
        each.report(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", action="store_true", help="what offloading costs others")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    parser.add_argument("--disk", default=None, help="folder for the disk tier; unset: temporary")
    arguments = parser.parse_args()
    set_thread_defaults()
    if arguments.iterations:
        measure_iterations(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
