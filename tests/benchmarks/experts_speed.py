"""Tokens a second of a mixture of experts: the fused runner beside transformers' classes.

::

    OMP_NUM_THREADS=2 python -m tests.benchmarks.experts_speed [--dtype bf16] [--experts 32]

The model is a random Qwen3-MoE of the shape of a 1B one with fewer layers, made in a temporary
folder; both runners load it, each on native attention, and run the same iterations in turn, A B A
B: generations of B sequences that hold 256 tokens each, and one context of 512 tokens. Figures are
of the fastest iteration, because other work on the machine can only add to one. "read" is the share
of all expert weights that the generations' tokens choose, on average of the layers.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inflight.api.config import InflightConfig
from inflight.model.factory import load_hf_runner
from inflight.model.fused.load import build_fused_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.runner import ModelRunner, PackedInputs
from inflight.native.experts import Routing
from inflight.native.library import load_native
from tests.benchmarks.compare.limits import fastest
from tests.benchmarks.fused_speed import (
    BATCHES,
    BLOCKS_OF_A_SEQUENCE,
    CHUNK,
    TOKENS_PER_BLOCK,
    steps,
)

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}


def save_model(directory: Path, num_experts: int, num_chosen: int) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", **SHAPE, num_experts=num_experts, num_experts_per_tok=num_chosen
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def share_of_experts(runner: FusedRunner, inputs: PackedInputs) -> float:
    """Of one iteration, counted where the rows go."""
    counted: list[float] = []
    experts = runner.decoder.ops.experts
    route = experts.route

    def counting(logits: torch.Tensor, routing: Routing, **options: bool) -> None:
        route(logits, routing, **options)
        starts = torch.cat((routing.ends.new_zeros(1), routing.ends[:-1]))
        counted.append(float((routing.ends > starts).float().mean()))

    with patch.object(experts, "route", counting):
        runner.forward(inputs)
    return sum(counted) / len(counted)


def compare(fused: FusedRunner, hf: ModelRunner, seconds: float, repeats: int) -> None:
    print(f"{'iteration':14}{'read':>6}{'fused tok/s':>13}{'hf tok/s':>10}{'ratio':>7}")
    for name, inputs in steps(fused.spec.vocab_size).items():
        best: dict[ModelRunner, float] = {}
        for _ in range(repeats):
            for runner in (fused, hf):
                taken = fastest(partial(runner.forward, inputs), seconds)
                best[runner] = min(taken, best.get(runner, taken))
        num_tokens = len(inputs.token_ids)
        ours, theirs = num_tokens / best[fused], num_tokens / best[hf]
        share = share_of_experts(fused, inputs)
        print(f"{name:14}{share:6.0%}{ours:13.1f}{theirs:10.1f}{ours / theirs:6.1f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=8, help="experts for each token")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = InflightConfig(dtype=options.dtype, max_num_tokens=CHUNK)
    library = load_native("")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory, options.experts, options.chosen)
        fused = build_fused_runner(directory, config, library)
        hf = load_hf_runner(directory, config, library)
        for runner in (fused, hf):
            runner.allocate_kv_cache(max(BATCHES) * BLOCKS_OF_A_SEQUENCE, TOKENS_PER_BLOCK)
        print(
            f"{torch.get_num_threads()} threads, {library.isa.name if library else 'torch'}, "
            f"{options.dtype}, {options.chosen} of {options.experts} experts"
        )
        compare(fused, hf, options.seconds, options.repeats)


if __name__ == "__main__":
    main()
