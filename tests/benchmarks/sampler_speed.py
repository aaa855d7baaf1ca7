"""Microseconds of Sampler.sample: python tests/benchmarks/sampler_speed.py

Each figure is the best of several calls on fresh copies of the same logits (the copy is not timed),
shaped like a language model's: a normal bulk with a few tall peaks. ``argmax`` is numpy alone, the
floor of the greedy rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight import Request, SamplingConfig
from inflight.batch import LlmRequest
from inflight.sampling import Sampler

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}
BATCH_SIZES = (1, 8, 64)
PROMPT_TOKENS = 512


def make_logits(rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(0)
    logits = generator.normal(scale=2.0, size=(rows, vocab_size)).astype(np.float32)
    peaks = generator.integers(vocab_size, size=(rows, 40))
    np.put_along_axis(logits, peaks, generator.normal(9, 3, peaks.shape).astype(np.float32), axis=1)
    return logits


def make_requests(rows: int, vocab_size: int, settings: dict[str, Any]) -> list[LlmRequest]:
    generator = np.random.default_rng(1)
    requests = []
    for index in range(rows):
        request = Request(
            input_token_ids=tuple(generator.integers(vocab_size, size=PROMPT_TOKENS).tolist()),
            max_tokens=8,
            sampling_config=SamplingConfig(**settings),
        )
        requests.append(
            LlmRequest(index, request, arrival_time=0.0, rank=0.0, end_ids=(2,), seed=index)
        )
    return requests


def best_microseconds(
    call: Callable[[npt.NDArray[np.float32]], object], logits: npt.NDArray[np.float32], repeats: int
) -> float:
    best = float("inf")
    for _ in range(repeats):
        fresh = logits.copy()
        start = time.perf_counter()
        call(fresh)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the sampler.")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    header = "".join(f"{f'B {size}':>10}" for size in BATCH_SIZES)
    print(f"microseconds, vocabulary {arguments.vocab_size}\n{'':24}{header}")
    blocks = {size: make_logits(size, arguments.vocab_size) for size in BATCH_SIZES}
    floor = [
        best_microseconds(lambda rows: rows.argmax(axis=1), blocks[size], arguments.repeats)
        for size in BATCH_SIZES
    ]
    print(f"{'argmax':24}" + "".join(f"{value:10.0f}" for value in floor))
    for name, settings in STRATEGIES.items():
        figures = []
        for size in BATCH_SIZES:
            sampler = Sampler(vocab_size=arguments.vocab_size, normalize_log_probs=False)
            requests = make_requests(size, arguments.vocab_size, settings)
            for request in requests:
                sampler.add(request)

            def sample(
                rows: npt.NDArray[np.float32],
                sampler: Sampler = sampler,
                requests: list[LlmRequest] = requests,
            ) -> object:
                return sampler.sample(requests, rows)

            figures.append(best_microseconds(sample, blocks[size], arguments.repeats))
        print(f"{name:24}" + "".join(f"{value:10.0f}" for value in figures))


if __name__ == "__main__":
    main()
