"""Eager transformers beside the engine: its own classes and KV cache, no graphs, no compilation."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.gpu.engine_bench import CARD, Bench, free_memory
from tests.gpu.engine_shapes import hf_config, seconds_of
from tests.gpu.rows import Row, emit

TARGET = 3.0
"""Times its tokens per second."""
NUM_STEPS = 8
NUM_FIRST_STEPS = 2
"""Of those, not counted."""


def measure_eager(bench: Bench, engine_rate: float) -> None:
    """``engine_rate``: the engine's tokens per second at the same batch size and lengths."""
    scale = bench.scale
    rate = scale.eager_batch / median(_step_seconds(bench)[NUM_FIRST_STEPS:])
    free_memory(bench.device)
    emit(
        Row(
            what=f"{bench.name} generation, batch {scale.eager_batch}, over eager transformers",
            value=engine_rate / rate,
            unit="times",
            target=TARGET if scale is CARD else None,
            note=f"eager: {rate:.0f} tokens/s",
        )
    )


@torch.inference_mode()
def _step_seconds(bench: Bench) -> list[float]:
    scale, config = bench.scale, hf_config(bench.shape)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype).eval()
        tokens = torch.tensor(bench.prompts(scale.eager_batch, scale.prompt_length))
    cache: Any = None

    def step() -> None:
        nonlocal tokens, cache
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values

    step()
    return [seconds_of(bench.device, step) for _ in range(NUM_STEPS)]
