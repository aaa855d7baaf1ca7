"""Microseconds of Sampler.rows and sample: python -m tests.benchmarks.sampler_speed

With numpy's kernels and with the native ones, in turn, and how many times faster those are. Each
figure is the best of several calls on fresh copies of the same logits (the copy is not timed),
shaped like a language model's: a normal bulk with a few tall peaks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight import Request, SamplingConfig
from inflight.batch import LlmRequest
from inflight.native.library import load_native
from inflight.native.sampling import NativeSampling
from inflight.sampling import Sampler
from inflight.sampling.kernels import NumpySampling, SamplingKernels

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}
Logits = npt.NDArray[np.float32]
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
    calls: Sequence[Callable[[Logits], object]], logits: Logits, repeats: int
) -> list[float]:
    """Of each call, made in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for index, call in enumerate(calls):
            fresh = logits.copy()
            start = time.perf_counter()
            call(fresh)
            best[index] = min(best[index], time.perf_counter() - start)
    return [seconds * 1e6 for seconds in best]


def sampling_call(
    kernels: SamplingKernels, settings: dict[str, Any], rows: int, vocab_size: int
) -> Callable[[Logits], object]:
    sampler = Sampler(vocab_size=vocab_size, normalize_log_probs=False, kernels=kernels)
    requests = make_requests(rows, vocab_size, settings)
    for request in requests:
        sampler.add(request)
    return lambda logits: sampler.sample(sampler.rows(requests), logits)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the sampler.")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    size, library = arguments.vocab_size, load_native("")
    kernels: list[SamplingKernels] = [NumpySampling(size)]
    if library is not None:
        kernels.append(NativeSampling(library))
    header = "".join(f"{f'B {rows}':>24}" for rows in BATCH_SIZES)
    print(f"microseconds numpy -> native, vocabulary {size}\n{'':24}{header}")
    for name, settings in STRATEGIES.items():
        line = f"{name:24}"
        for rows in BATCH_SIZES:
            calls = [sampling_call(each, settings, rows, size) for each in kernels]
            figures = best_microseconds(calls, make_logits(rows, size), arguments.repeats)
            both = " -> ".join(f"{figure:.0f}" for figure in figures)
            line += f"{both:>17} {figures[0] / figures[-1]:5.1f}x"
        print(line)


if __name__ == "__main__":
    main()
