"""How fast a workload could be at best: its arithmetic and its reading against the limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from tests.benchmarks.compare.limits import Limits
from tests.benchmarks.compare.workloads import Workload

BYTES_OF_A_WEIGHT = {"fp32": 4.0, "bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32}
"""int8 and int4 as blocks of 32 with one 16-bit scale."""


@dataclass(frozen=True)
class ModelShape:
    """What a decoder of dense layers has to compute and to read."""

    layer_weights: int
    """Numbers in the matrices of all layers."""
    head_weights: int
    """Numbers in the matrix that makes logits."""
    num_layers: int
    attention_width: int
    """Query heads x head size."""

    @staticmethod
    def of_checkpoint(directory: Path) -> ModelShape:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        layer_weights = 0
        with safe_open(directory / "model.safetensors", "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                shape = tensors.get_slice(name).get_shape()
                if ".layers." in name and len(shape) == 2:
                    layer_weights += shape[0] * shape[1]
        return ModelShape(
            layer_weights=layer_weights,
            head_weights=config["vocab_size"] * config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            attention_width=heads * (config.get("head_dim") or config["hidden_size"] // heads),
        )

    def weight_bytes(self, dtype: str) -> int:
        """Bytes that an iteration reads of the weights at least."""
        return int((self.layer_weights + self.head_weights) * BYTES_OF_A_WEIGHT[dtype])

    def flops(self, workload: Workload) -> float:
        """Multiplications and additions: each token's layers once, attention to what lies before
        it, and logits for the tokens that are generated. A shared prefix counts once if prefixes
        are reused."""
        tokens, positions = 0, 0
        for place, job in enumerate(workload.jobs):
            last = len(job.prompt) + job.max_tokens - 1  # the last token generated is not fed back
            first = workload.shared_tokens if workload.reuses_prefixes and place else 0
            tokens += last - first
            positions += (last * (last + 1) - first * (first + 1)) // 2
        return (
            2.0 * self.layer_weights * tokens
            + 2.0 * self.head_weights * workload.num_output_tokens
            + 4.0 * self.num_layers * self.attention_width * positions
        )


def least_seconds(workload: Workload, shape: ModelShape, dtype: str, limits: Limits) -> float:
    """No system on this machine can be faster: the larger of two bounds.

    All arithmetic at the rate of large matrix products; and the weights read once in each of the
    iterations there must be, since a request gets one token in each and at most ``concurrency``
    requests take part. Reading KV is not counted.
    """
    longest = max(job.max_tokens for job in workload.jobs)
    num_iterations = max(longest, -(-workload.num_output_tokens // workload.concurrency))
    computing = shape.flops(workload) / limits.flops_for(dtype)
    reading = num_iterations * shape.weight_bytes(dtype) / limits.read_bytes
    return max(computing, reading)
