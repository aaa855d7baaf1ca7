"""How fast a workload could be at best: its arithmetic and its reading against the limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from tests.benchmarks.compare.limits import Limits
from tests.benchmarks.compare.workloads import Workload

Sizes = dict[str, tuple[int, int]]
"""Rows and columns of matrices by name."""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the matrices outside of the layers; the first makes logits where there is no second."""


@dataclass(frozen=True)
class ModelShape:
    """What a decoder of dense layers has to compute and to read, with weights of one dtype."""

    layer_weights: int
    """Numbers in the matrices of all layers."""
    head_weights: int
    """Numbers in the matrix that makes logits."""
    num_layers: int
    attention_width: int
    """Query heads x head size."""
    weight_bytes: int
    """Bytes that an iteration reads of the weights at least: of those of our engine, whatever
    blocks of its own another system has for the dtype."""

    @staticmethod
    def of_checkpoint(directory: Path, dtype: str) -> ModelShape:
        """``dtype``: a value of the key of that name."""
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        layers, head = _matrices(directory)
        return ModelShape(
            layer_weights=sum(n * k for n, k in layers.values()),
            head_weights=sum(n * k for n, k in head.values()),
            num_layers=config["num_hidden_layers"],
            attention_width=heads * (config.get("head_dim") or config["hidden_size"] // heads),
            weight_bytes=packed_weight_bytes(directory, dtype, layers | head),
        )

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


def _matrices(directory: Path) -> tuple[Sizes, Sizes]:
    """Those of the layers, and the one that makes logits."""
    layers: Sizes = {}
    outside: Sizes = {}
    with safe_open(directory / "model.safetensors", "np") as tensors:
        for file_name in tensors.keys():  # noqa: SIM118 - it is no mapping
            shape = tensors.get_slice(file_name).get_shape()
            name = file_name.removesuffix(".weight")
            if len(shape) == 2 and ".layers." in name:
                layers[name] = (shape[0], shape[1])
            elif name in (EMBEDDING, HEAD):
                outside[name] = (shape[0], shape[1])
    head = HEAD if HEAD in outside else EMBEDDING
    return layers, {head: outside[head]}


def packed_weight_bytes(directory: Path, dtype: str, matrices: Sizes) -> int:
    """Bytes of the matrices as the engine packs them for a value of the key ``dtype``: by its own
    rules, since some of a checkpoint's weights may run in the blocks that they were stored in."""
    from inflight.model.fused.load import weight_kinds
    from inflight.model.fused.stored_blocks import StoredBlocks
    from inflight.model.fused.tensors import CheckpointTensors
    from inflight.native.packed import packed_bytes

    kind, _ = weight_kinds(dtype)
    stored = StoredBlocks(CheckpointTensors(directory), kind)
    total = 0
    for name, (n, k) in matrices.items():
        blocks = stored.of([name], n, k)
        packed_kind = blocks.kind if blocks is not None else stored.kind_for([name])
        total += packed_bytes(packed_kind, n, k, is_gate_up=False)
    return total


def least_seconds(workload: Workload, shape: ModelShape, dtype: str, limits: Limits) -> float:
    """No system on this machine can be faster: the larger of two bounds.

    All arithmetic at the rate of large matrix products; and the weights read once in each of the
    iterations there must be, since a request gets one token in each and at most ``concurrency``
    requests take part. Reading KV is not counted. Weights are read at the rate of memory: a system
    whose weights stay in the cache that the cores share may read them faster.
    """
    longest = max(job.max_tokens for job in workload.jobs)
    num_iterations = max(longest, -(-workload.num_output_tokens // workload.concurrency))
    computing = shape.flops(workload) / limits.flops_for(dtype)
    reading = num_iterations * shape.weight_bytes / limits.read_bytes
    return max(computing, reading)
