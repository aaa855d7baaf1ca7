"""A working set three times the primary KV pool: hit rate and TTFT with and without tiers.

    python tests/benchmarks/kv_tiers.py [--prompts 12] [--length 512] [--rounds 3]

Each prompt is asked again and again, one after the other, in a pool that holds a third of them:
the worst case for an LRU cache, which without tiers never hits. Host memory alone holds everything;
with the disk it holds a third, and the disk the rest. A persisted disk is then asked by a new
engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from inflight.api import ExecutorConfig, KvCacheConfig, KvTiersConfig, Request
from inflight.api.config import InflightConfig
from inflight.api.stats import KvTiersStats
from inflight.checkpoint import prepare_checkpoint
from inflight.executor import Executor
from inflight.model.factory import load_runner
from inflight.model.runner import ModelRunner

VOCABULARY = 40_000
TOKENS_PER_BLOCK = 32
SHARE_OF_POOL = 3


@dataclass
class Outcome:
    first_tokens: list[float]
    """Seconds to the first token of each request after the first round."""
    hit_rate: float
    tiers: KvTiersStats | None


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
    iterations = executor.get_latest_iteration_stats()
    return Outcome(first_tokens, reused / looked_up, iterations[-1].kv_tiers_stats)


def report(name: str, outcome: Outcome, base: Outcome) -> None:
    median = statistics.median(outcome.first_tokens)
    ratio = statistics.median(base.first_tokens) / median
    print(
        f"{name:14} hit rate {outcome.hit_rate:.3f}, TTFT median {median * 1000:7.1f} ms, "
        f"slowest {max(outcome.first_tokens) * 1000:7.1f} ms, {ratio:5.2f}x as fast as without"
    )
    tiers = outcome.tiers
    if tiers is None:
        return
    rates = (tiers.host_bytes_per_second, tiers.disk_bytes_per_second)
    host, disk = ("-" if rate is None else f"{rate / 1e9:.2f} GB/s" for rate in rates)
    context = tiers.context_tokens_per_second or 0.0
    print(
        f"{'':14} offloaded {tiers.offloaded_bytes >> 20} MiB, onboarded "
        f"{tiers.onboarded_host_blocks} + {tiers.onboarded_disk_blocks} blocks, dropped "
        f"{tiers.dropped_blocks}, computed instead {tiers.recompute_decisions}, late "
        f"{tiers.late_loads}; host {host}, disk {disk}, context {context:.0f} tokens/s"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    parser.add_argument("--disk", default=None, help="folder for the disk tier; unset: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
