"""A prefix that many requests share, with block reuse on and off, side by side in one run.

    python tests/benchmarks/prefix_reuse.py [--requests 32] [--prefix 1024] [--suffix 32]

All requests arrive at once, with a common prefix and a suffix of their own each. The highest hit
rate there can be: every request but the first finds the whole blocks of the prefix.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from inflight.api import ExecutorConfig, KvCacheConfig, Request
from inflight.api.config import InflightConfig
from inflight.checkpoint import prepare_checkpoint
from inflight.executor import Executor
from inflight.model.factory import load_runner

VOCABULARY = 40_000


@dataclass(frozen=True)
class Outcome:
    seconds: float
    first_tokens: list[float]
    """Seconds from the start to the first token of each request."""
    num_reused: int
    num_missed: int

    @property
    def hit_rate(self) -> float:
        looked_up = self.num_reused + self.num_missed
        return self.num_reused / looked_up if looked_up else 0.0


def make_load(arguments: argparse.Namespace, draw: random.Random) -> list[Request]:
    """A prefix that was never seen before, so that every run starts cold."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, VOCABULARY) for _ in range(count)]

    prefix = tokens(arguments.prefix)
    return [
        Request(
            input_token_ids=(*prefix, *tokens(arguments.suffix)),
            max_tokens=arguments.max_tokens,
            end_ids=(),
            streaming=True,
        )
        for _ in range(arguments.requests)
    ]


def run(executor: Executor, requests: list[Request]) -> Outcome:
    before = executor.kv_cache_stats()
    began = time.perf_counter()
    waiting = {executor.enqueue_request(request) for request in requests}
    first_tokens: dict[int, float] = {}
    while waiting:
        for response in executor.await_responses():
            assert response.error is None, response.error
            first_tokens.setdefault(response.request_id, time.perf_counter() - began)
            if response.is_final:
                waiting.discard(response.request_id)
    after = executor.kv_cache_stats()
    return Outcome(
        time.perf_counter() - began,
        list(first_tokens.values()),
        after.reused_blocks - before.reused_blocks,
        after.missed_blocks - before.missed_blocks,
    )


def make_executor(arguments: argparse.Namespace, reuse: bool) -> Executor:
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    runner = load_runner(directory, InflightConfig(dtype=arguments.dtype))
    tokens = arguments.prefix + arguments.suffix + arguments.max_tokens
    size = arguments.tokens_per_block
    config = ExecutorConfig(
        max_batch_size=arguments.requests,
        max_seq_len=tokens,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=size,
            num_blocks=(arguments.requests + 1) * -(-tokens // size),
            enable_block_reuse=reuse,
        ),
    )
    return Executor(runner, config)


def highest_hit_rate(arguments: argparse.Namespace) -> float:
    whole = arguments.prefix // arguments.tokens_per_block
    of_each = -(-(arguments.prefix + arguments.suffix) // arguments.tokens_per_block)
    # Where the prefix ends inside a block, that block is reused in part.
    part = int(arguments.prefix % arguments.tokens_per_block > 0)
    return float((arguments.requests - 1) * (whole + part) / (arguments.requests * of_each))


def compare(arguments: argparse.Namespace) -> None:
    executors = {reuse: make_executor(arguments, reuse) for reuse in (True, False)}
    draw = random.Random(5)
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    for _ in range(arguments.repeat):
        requests = make_load(arguments, draw)
        for reuse, executor in executors.items():  # A B A B
            outcomes[reuse].append(run(executor, requests))
    for executor in executors.values():
        executor.shutdown()
    for reuse, runs in outcomes.items():
        first = statistics.median(statistics.median(o.first_tokens) for o in runs)
        print(
            f"reuse {'on' if reuse else 'off':4} {min(o.seconds for o in runs):7.2f} s, "
            f"median TTFT {first:6.2f} s, hit rate {runs[0].hit_rate:.3f}"
        )
    pairs = list(zip(outcomes[True], outcomes[False], strict=True))
    seconds = statistics.median(off.seconds / on.seconds for on, off in pairs)
    ttft = statistics.median(
        statistics.median(off.first_tokens) / statistics.median(on.first_tokens)
        for on, off in pairs
    )
    print(
        f"off / on: {seconds:.2f}x time, {ttft:.2f}x median TTFT; "
        f"highest possible hit rate {highest_hit_rate(arguments):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
