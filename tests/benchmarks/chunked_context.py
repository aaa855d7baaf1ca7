"""What running streams feel of a long prompt: python tests/benchmarks/chunked_context.py

Eight streams run; a prompt of 4,096 tokens arrives. Printed are the gaps between their tokens from
its arrival to its first token: the longest, p99, p95 and p50. Three engines, in turn in each round:

- one piece: max_num_tokens takes the whole prompt in one iteration;
- chunked:   max_num_tokens 512, the default;
- target:    chunks sized by target_inter_token_ms.

A first prompt, not measured, warms all up and teaches the target.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from inflight.api import ExecutorConfig, KvCacheConfig, Request, SchedulerConfig
from inflight.api.config import InflightConfig
from inflight.checkpoint import prepare_checkpoint
from inflight.executor import Executor
from inflight.model.factory import load_runner

NUM_STREAMS, STREAM_PROMPT, PROMPT = 8, 64, 4096
MAX_SEQ_LEN = 8192


def token_ids(count: int, draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(100, 40_000) for _ in range(count))


class Streams:
    """The eight streams, read by one thread that notes when each token came."""

    def __init__(self, executor: Executor, draw: random.Random) -> None:
        self._executor = executor
        self._ids = {
            executor.enqueue_request(
                Request(
                    input_token_ids=token_ids(STREAM_PROMPT, draw),
                    max_tokens=MAX_SEQ_LEN - STREAM_PROMPT,
                    streaming=True,
                    end_ids=(),
                )
            )
            for _ in range(NUM_STREAMS)
        }
        self._times: dict[int, list[float]] = {each: [] for each in self._ids}
        self._first_tokens: dict[int, float] = {}
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run_prompt(self, draw: random.Random) -> tuple[list[float], float]:
        """Gaps of all streams while the prompt's context runs, and its time to the first token."""
        request = Request(
            input_token_ids=token_ids(PROMPT, draw), max_tokens=1, streaming=True, end_ids=()
        )
        begin = time.perf_counter()
        prompt = self._executor.enqueue_request(request)
        with self._arrived:
            self._arrived.wait_for(lambda: prompt in self._first_tokens)
        end = self._first_tokens[prompt]
        self.wait(2)
        gaps = [gap for times in self._times.values() for gap in gaps_between(times, begin, end)]
        return gaps, end - begin

    def wait(self, num_tokens: int) -> None:
        """Until every stream has got that many more tokens."""
        wanted = {each: len(times) + num_tokens for each, times in self._times.items()}
        with self._arrived:
            self._arrived.wait_for(
                lambda: all(len(self._times[each]) >= count for each, count in wanted.items())
            )

    def stop(self) -> None:
        for each in self._ids:
            self._executor.cancel_request(each)
        self._reader.join()

    def _read(self) -> None:
        num_running = NUM_STREAMS
        while num_running:
            responses = self._executor.await_responses()
            now = time.perf_counter()
            with self._arrived:
                for response in responses:
                    assert response.result is not None, response.error
                    if response.request_id not in self._ids:
                        self._first_tokens.setdefault(response.request_id, now)
                        continue
                    self._times[response.request_id].append(now)
                    num_running -= response.is_final
                self._arrived.notify_all()


def gaps_between(times: Iterable[float], begin: float, end: float) -> list[float]:
    """Those that lie in [begin, end] with some part of them."""
    marks = list(times)
    pairs = zip(marks, marks[1:], strict=False)
    return [after - before for before, after in pairs if after > begin and before < end]


def make_executor(directory: Path, dtype: str, max_num_tokens: int, target_ms: float) -> Executor:
    config = InflightConfig(dtype=dtype, max_num_tokens=max_num_tokens, max_seq_len=MAX_SEQ_LEN)
    return Executor(
        load_runner(directory, config),
        ExecutorConfig(
            max_batch_size=16,
            max_num_tokens=max_num_tokens,
            max_seq_len=MAX_SEQ_LEN,
            scheduler_config=SchedulerConfig(target_inter_token_ms=target_ms),
            kv_cache_config=KvCacheConfig(
                num_blocks=16 * MAX_SEQ_LEN // 32, enable_block_reuse=False
            ),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Gaps of running streams beside a long prompt.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target-ms", type=float, default=50.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    arguments = parser.parse_args()
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    engines = {
        "one piece": (PROMPT + 512, 0.0),
        "chunked": (512, 0.0),
        f"target {arguments.target_ms:g} ms": (512, arguments.target_ms),
    }
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    first_tokens: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(arguments.rounds):
        for name, (max_num_tokens, target_ms) in engines.items():
            with make_executor(directory, arguments.dtype, max_num_tokens, target_ms) as executor:
                streams = Streams(executor, draw := random.Random(7))
                streams.wait(30)
                streams.run_prompt(draw)
                streams.wait(10)
                measured, first_token = streams.run_prompt(draw)
                gaps[name] += measured
                first_tokens[name].append(first_token)
                streams.stop()
    print(f"{'':16}{'longest':>10}{'p99':>10}{'p95':>10}{'p50':>10}{'prompt':>10}   milliseconds")
    longest = {name: max(values) for name, values in gaps.items()}
    for name, values in gaps.items():
        row = [longest[name], *(float(np.quantile(values, q)) for q in (0.99, 0.95, 0.5))]
        row.append(min(first_tokens[name]))
        print(f"{name:16}" + "".join(f"{value * 1000:10.1f}" for value in row))
    print(f"longest gap, one piece / chunked: {longest['one piece'] / longest['chunked']:.1f}x")


if __name__ == "__main__":
    main()
