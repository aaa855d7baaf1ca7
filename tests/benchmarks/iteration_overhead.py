"""Where an iteration's time goes.

    python tests/benchmarks/iteration_overhead.py [--sampling all] [--batch-sizes 1,8,32,64]

Batches of streaming requests generate. The loop is stepped without other threads, so that nothing
overlaps and every part shows. Each figure is the least of many iterations, in microseconds; "rest"
is the loop itself. The last table is what the project promises to keep to 5% at batch 32.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from inflight.api import ExecutorConfig, KvCacheConfig, Request, SamplingConfig
from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.checkpoint import prepare_checkpoint
from inflight.engine.engine import Engine
from inflight.model.factory import load_runner
from inflight.model.sampling import load_sampling_kernels
from inflight.text.stream import TextStream
from inflight.text.tokenizer import Tokenizer

BATCH_SIZES = (1, 8, 32, 64)
MAX_SEQ_LEN, WARM_UP = 1024, 20
PROMPT = "Once upon a time there was number {} and "

SAMPLING = {
    "greedy": SamplingConfig(),
    "temperature": SamplingConfig(temperature=0.8, seed=1),
    "top_k": SamplingConfig(top_k=50, seed=1),
    "top_p": SamplingConfig(top_p=0.9, seed=1),
}
OVERHEAD = ("scheduler", "packing", "sampling")


class Stopwatch:
    """Adds up the time that an iteration spends inside the methods that it watches."""

    def __init__(self, engine: Engine) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._least: dict[str, float] = {}
        parts = engine.loop.parts
        for name, owner, methods in (
            ("scheduler", parts.scheduler, ["schedule"]),
            ("KV books", parts.kv, ["reserve", "commit"]),
            ("packing", parts.packer, ["pack"]),
            ("sampling", parts.sampler, ["rows", "sample", "take_likeliest"]),
            ("forward", parts.runner, ["forward"]),
            ("responses", parts.responder, ["delta", "flush"]),
            ("statistics", parts.stats, ["record"]),
        ):
            for method in methods:
                setattr(owner, method, self._timed(getattr(owner, method), name))

    def lap(self, seconds: float) -> None:
        """An iteration is over; it took so long."""
        self._seconds["rest"] = seconds - sum(self._seconds.values())
        self._seconds["iteration"] = seconds
        for name, value in self._seconds.items():
            self._least[name] = min(value, self._least.get(name, value))
        self._seconds.clear()

    def least(self) -> dict[str, float]:
        return self._least

    def watch_text(self) -> Callable[[], None]:
        """Of all streams; returns what ends it."""
        append = TextStream.append
        TextStream.append = self._timed(append, "text")  # type: ignore[method-assign]
        return lambda: setattr(TextStream, "append", append)

    def _timed(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self._seconds[name] += time.perf_counter() - began

        return timed


def make_engine(directory: Path, config: InflightConfig, batch_size: int) -> Engine:
    runner = load_runner(directory, config)
    num_blocks = batch_size * (MAX_SEQ_LEN // config.tokens_per_block)
    return Engine(
        runner,
        ExecutorConfig(
            max_seq_len=MAX_SEQ_LEN, kv_cache_config=KvCacheConfig(num_blocks=num_blocks + 8)
        ),
        tokenizer=Tokenizer.from_directory(directory),
        sampling_kernels=load_sampling_kernels(config.cache_dir),
    )


def measure(
    directory: Path, config: InflightConfig, batch_size: int, sampling: SamplingConfig, steps: int
) -> dict[str, float]:
    """The least seconds of each part and of a whole iteration."""
    engine = make_engine(directory, config, batch_size)
    tokenizer = Tokenizer.from_directory(directory)
    for number in range(batch_size):
        request = Request(
            input_token_ids=tuple(tokenizer.encode(PROMPT.format(number))),
            max_tokens=2 * WARM_UP + steps,
            streaming=True,
            end_ids=(),
            sampling_config=sampling,
        )
        engine.enqueue(engine.next_id(), request)
    for _ in range(WARM_UP):
        engine.loop.step()
    watch = Stopwatch(engine)
    stop = watch.watch_text()
    for _ in range(steps):
        began = time.perf_counter()
        engine.loop.step()
        watch.lap(time.perf_counter() - began)
        engine.outbox.take(None, 0)
    stop()
    return watch.least()


Columns = dict[int, dict[str, float]]
"""What ``measure`` returns, by batch size."""


def print_row(head: str, cells: Iterable[str]) -> None:
    """Of a Markdown table."""
    print(f"| {head} | " + " | ".join(cells) + " |")


def print_parts(sampling: str, columns: Columns) -> None:
    print()
    print_row(f"{sampling}, us", (f"B {size}" for size in columns))
    print_row("---", ["---"] * len(columns))
    for name in next(iter(columns.values())):
        print_row(name, (f"{c[name] * 1e6:.0f} ({share(c, name):.1%})" for c in columns.values()))


def share(column: Mapping[str, float], *names: str) -> float:
    """Of the iteration."""
    return sum(column[name] for name in names) / column["iteration"]


def sizes(text: str) -> list[int]:
    """An argparse type: batch sizes with commas between them."""
    return [int(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of an iteration in microseconds.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sampling", choices=[*SAMPLING, "all"], default="greedy")
    parser.add_argument("--batch-sizes", type=sizes, default=list(BATCH_SIZES))
    parser.add_argument("--model", default="", help="checkpoint folder; empty: the embedded model")
    arguments = parser.parse_args()
    set_thread_defaults()
    directory = prepare_checkpoint(arguments.model, "", progress=print).directory
    config = InflightConfig(dtype=arguments.dtype, max_seq_len=MAX_SEQ_LEN)
    measured: dict[str, Columns] = {}
    for kind in SAMPLING if arguments.sampling == "all" else [arguments.sampling]:
        measured[kind] = {
            size: measure(directory, config, size, SAMPLING[kind], arguments.steps)
            for size in arguments.batch_sizes
        }
        print_parts(kind, measured[kind])
    print()
    print_row(" + ".join(OVERHEAD), (f"B {size}" for size in arguments.batch_sizes))
    print_row("---", ["---"] * len(arguments.batch_sizes))
    for kind, columns in measured.items():
        print_row(kind, (f"{share(column, *OVERHEAD):.1%}" for column in columns.values()))


if __name__ == "__main__":
    main()
