"""Stage: the whole engine on random weights: generation and contexts against what this machine can
do, with and without CUDA graphs, beside eager transformers, and with KV tiers.

On the CPU stand-in the same code runs on a tiny model, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from inflight import Executor
from inflight.api import SamplingConfig
from inflight.model.device.load import make_runtime, tune_kernels
from tests.gpu.card import is_skipped
from tests.gpu.engine_bench import CARD, SMALL, Bench, free_memory, generation_rate
from tests.gpu.engine_eager import measure_eager
from tests.gpu.engine_shapes import measure_ceilings, spec_of
from tests.gpu.engine_tiers import measure_block_moves, measure_tiers
from tests.gpu.rows import Outcome, Row, emit


def measure_generation(bench: Bench, executor: Executor) -> dict[int, float]:
    scale, rates = bench.scale, {}
    for batch, target in scale.targets.items():
        prompts = bench.prompts(batch, scale.prompt_length, seed=batch)
        rate = generation_rate(executor, prompts, scale.num_tokens)
        context = scale.prompt_length + scale.num_tokens // 2
        least = bench.work.generation_seconds(batch, context, bench.ceilings)
        rates[batch] = rate
        emit(
            Row(
                what=f"{bench.name} generation, batch {batch}",
                value=rate,
                unit="tokens/s",
                ceiling=batch / least,
                target=target,
            )
        )
    return rates


def measure_context(bench: Bench, executor: Executor) -> None:
    """Several prompts that come together, each of one new token."""
    scale = bench.scale
    count = max(1, scale.max_num_tokens // scale.context_length)
    seconds = []
    for seed in range(4):
        prompts = bench.prompts(count, scale.context_length, seed=1000 + seed)
        began = time.perf_counter()
        executor.generate(prompts, max_tokens=1, end_ids=())
        seconds.append(time.perf_counter() - began)
    tokens = count * scale.context_length
    least = bench.work.context_seconds(scale.context_length, count, bench.ceilings)
    emit(
        Row(
            what=f"{bench.name} contexts, {count} of {scale.context_length} tokens",
            value=tokens / min(seconds[1:]),
            unit="tokens/s",
            ceiling=tokens / least,
            target=scale.context_target,
        )
    )


def measure_sampled(bench: Bench, executor: Executor, rates: Mapping[int, float]) -> None:
    """Generations of requests that sample; ``rates``: of greedy ones."""
    scale = bench.scale
    sampling = SamplingConfig(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=1)
    for batch in rates:
        prompts = bench.prompts(batch, scale.prompt_length, seed=batch)
        rate = generation_rate(executor, prompts, scale.num_tokens, sampling)
        emit(
            Row(
                what=f"{bench.name} generation, sampled, batch {batch}",
                value=rate,
                unit="tokens/s",
                note=f"{rate / rates[batch]:.2f} times the greedy rate",
            )
        )


def measure_variant(bench: Bench, what: str, rates: Mapping[int, float], **keys: Any) -> None:
    """The same engine with other configuration keys; ``rates``: without these."""
    scale = bench.scale
    with bench.engine(**keys) as executor:
        for batch in scale.variant_batches:
            prompts = bench.prompts(batch, scale.prompt_length, seed=batch)
            rate = generation_rate(executor, prompts, scale.num_tokens)
            emit(
                Row(
                    what=f"{bench.name} generation {what}, batch {batch}",
                    value=rate,
                    unit="tokens/s",
                    note=f"{rate / rates[batch]:.2f} times",
                )
            )


def measure_rest(bench: Bench, rates: Mapping[int, float]) -> None:
    """Other configurations, and tiers, which experts do not change; ``rates``: of
    ``measure_engine``."""
    if bench.name in bench.scale.shapes:
        measure_variant(bench, "without graphs", rates, cuda_graph_mode=False)
        free_memory(bench.device)
        measure_block_moves(bench)
        measure_tiers(bench)
    measure_variant(bench, "with fp8 weights", rates, dtype="fp8")


def measure_engine(bench: Bench) -> tuple[dict[int, float], float]:
    """Tokens per second by batch size, and at that of eager transformers."""
    scale = bench.scale
    began = time.perf_counter()
    with bench.engine() as executor:
        ready = time.perf_counter() - began
        emit(Row(what=f"{bench.name} engine ready", value=ready, unit="s"))
        rates = measure_generation(bench, executor)
        measure_context(bench, executor)
        measure_sampled(bench, executor, rates)
        prompts = bench.prompts(scale.eager_batch, scale.prompt_length)
        return rates, generation_rate(executor, prompts, scale.num_tokens)


def measure_all(benches: Sequence[Bench], *, tunes: bool) -> None:
    """What is asked for comes first, of every shape: the suite may end the stage at any time."""
    rates: dict[str, Mapping[int, float]] = {}
    for bench in benches:
        has_experts = bench.name in bench.scale.expert_shapes
        with reported(bench):
            if tunes and not has_experts:
                tune_as_a_first_load(bench)
            rates[bench.name], rate = measure_engine(bench)
            if not has_experts:
                free_memory(bench.device)
                measure_eager(bench, rate)
    for bench in benches:
        if bench.name in rates:
            with reported(bench):
                measure_rest(bench, rates[bench.name])


def tune_as_a_first_load(bench: Bench) -> None:
    tune_kernels(
        spec_of(bench.shape),
        bench.config(),
        make_runtime(bench.device),
        lambda what, share: print(what, flush=True),
    )


@contextmanager
def reported(bench: Bench) -> Iterator[None]:
    """What fails becomes a row: the other shapes are still worth their time."""
    try:
        yield
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        emit(Row(what=bench.name, outcome=Outcome.FAILED, note=note))
    finally:
        free_memory(bench.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="in small, on the stand-in")
    parser.add_argument("--tune", action="store_true", help="as a first load does, but of experts")
    options = parser.parse_args()
    if is_skipped("engine", on_cpu=options.cpu):
        return
    scale = SMALL if options.cpu else CARD
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    dtype = torch.float32 if options.cpu else torch.bfloat16
    ceilings = measure_ceilings(device, dtype)
    emit(Row(what="copy", value=ceilings.bytes_per_second / 1e12, unit="TB/s"))
    rate = ceilings.flops_per_second / 1e12
    emit(Row(what=f"product in {scale.dtype}", value=rate, unit="TFLOP/s"))
    benches = [
        Bench(name=name, shape=shape, scale=scale, device=device, ceilings=ceilings)
        for name, shape in (scale.shapes | scale.expert_shapes).items()
    ]
    measure_all(benches, tunes=options.tune)


if __name__ == "__main__":
    main()
