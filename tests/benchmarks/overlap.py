"""What the forward thread gains: python tests/benchmarks/overlap.py

Two engines generate for streaming requests, a few iterations of one and then of the other: one
delivers beside the forward (ForwardThread), one before it (InlineLane). A reader takes what they
deliver. Printed are the least and the median milliseconds of an iteration, and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

from inflight.api import ExecutorConfig, KvCacheConfig, Request
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.checkpoint import prepare_checkpoint
from inflight.engine.engine import Engine
from inflight.engine.lane import ForwardLane, InlineLane
from inflight.executor.forward_thread import ForwardThread
from inflight.model.factory import load_runner
from inflight.text.tokenizer import Tokenizer

MAX_SEQ_LEN, TURN, WARM_UP = 1024, 10, 10
PROMPT = "Once upon a time there was number {} and "


def make_engine(
    directory: Path, config: InflightConfig, lane: ForwardLane, batch_size: int
) -> Engine:
    """With ``batch_size`` requests that generate until max_seq_len is near."""
    tokenizer = Tokenizer.from_directory(directory)
    num_blocks = batch_size * (MAX_SEQ_LEN // config.tokens_per_block) + 8
    engine = Engine(
        load_runner(directory, config),
        ExecutorConfig(
            max_seq_len=MAX_SEQ_LEN, kv_cache_config=KvCacheConfig(num_blocks=num_blocks)
        ),
        tokenizer=tokenizer,
        lane=lane,
    )
    for number in range(batch_size):
        ids = tuple(tokenizer.encode(PROMPT.format(number)))
        request = Request(input_token_ids=ids, max_tokens=900, streaming=True, end_ids=())
        engine.enqueue(engine.next_id(), request)
    for _ in range(WARM_UP):
        engine.loop.step()
    return engine


def read_all(engines: list[Engine], is_over: threading.Event) -> None:
    while not is_over.is_set():
        for engine in engines:
            engine.outbox.take(None, 0.002)


def compare(directory: Path, config: InflightConfig, batch_size: int, turns: int) -> str:
    with ForwardThread() as thread:
        lanes: dict[str, ForwardLane] = {"inline": InlineLane(), "thread": thread}
        engines = {
            name: make_engine(directory, config, lane, batch_size) for name, lane in lanes.items()
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        is_over = threading.Event()
        reader = threading.Thread(target=read_all, args=(list(engines.values()), is_over))
        reader.start()
        for _ in range(turns):
            for name, engine in engines.items():
                for _ in range(TURN):
                    began = time.perf_counter()
                    engine.loop.step()
                    times[name].append((time.perf_counter() - began) * 1000)
        is_over.set()
        reader.join()
    least = {name: min(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    return (
        f"B {batch_size:3}  inline {least['inline']:7.2f} {median['inline']:7.2f}   "
        f"thread {least['thread']:7.2f} {median['thread']:7.2f}   inline / thread "
        f"{least['inline'] / least['thread']:.3f} {median['inline'] / median['thread']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Iterations with and without a forward thread.")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: all cores")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    parser.add_argument(
        "--switch-interval", type=float, default=5.0, help="sys.setswitchinterval, milliseconds"
    )
    arguments = parser.parse_args()
    sys.setswitchinterval(arguments.switch_interval / 1000)
    set_thread_defaults()
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    config = InflightConfig(
        dtype=arguments.dtype, max_seq_len=MAX_SEQ_LEN, num_threads=arguments.threads
    )
    print("milliseconds of an iteration: least, median")
    for batch_size in arguments.batch_sizes.split(","):
        print(compare(directory, config, int(batch_size), arguments.turns), flush=True)


if __name__ == "__main__":
    main()
