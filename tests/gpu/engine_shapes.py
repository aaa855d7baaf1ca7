"""The models that the engine is measured on, of random weights made on the device, and the time
that a machine of given ceilings needs at least for an iteration of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from inflight.model.fused.families import decoder_spec
from inflight.model.fused.spec import DecoderSpec
from tests.gpu.random_checkpoint import LLAMA_1B, TINY

LLAMA_8B: Mapping[str, Any] = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Llama 3.1 8B."""

_QWEN3_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_MOE: Mapping[str, Any] = _QWEN3_EXPERTS | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
"""A quarter of the layers of Qwen3 30B-A3B."""

_TINY_MOE = _QWEN3_EXPERTS | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

SHAPES = {"1B": LLAMA_1B, "8B": LLAMA_8B}
EXPERT_SHAPES = {"MoE 8B": QWEN3_MOE}
TINY_SHAPES = {"tiny": TINY}
TINY_EXPERT_SHAPES: dict[str, Mapping[str, Any]] = {"tiny MoE": _TINY_MOE}


def hf_config(shape: Mapping[str, Any]) -> Any:
    values = {key: value for key, value in shape.items() if key != "model_type"}
    return AutoConfig.for_model(str(shape["model_type"]), **values)


def spec_of(shape: Mapping[str, Any]) -> DecoderSpec:
    return decoder_spec(hf_config(shape))


class RandomTensors:
    """A TensorSource whose weights let activations neither grow nor vanish."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        drawn = torch.randn(
            shape, generator=self._generator, device=self._device, dtype=self._dtype
        )
        weight: Tensor = drawn * shape[1] ** -0.5
        return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured in the same run."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an iteration has to read and to multiply."""

    layer_weights: int
    """Which every token is multiplied with; those of experts are not among them."""
    expert_weights: int
    """Of one expert of each layer."""
    num_experts: int
    num_chosen: int
    """Experts of a token in each layer; 0: there are none."""
    head_weights: int
    attention_width: int
    """Query heads x head_dim x layers."""
    kv_bytes_per_token: int
    bytes_per_weight: int

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: torch.dtype) -> Work:
        layers = expert = 0
        for layer in spec.layers:
            inner = 0 if layer.mlp is None else layer.mlp.intermediate_size
            layers += spec.hidden_size * (spec.qkv_size + spec.query_size + 3 * inner)
            if layer.experts is not None:
                expert += 3 * spec.hidden_size * layer.experts.mlp.intermediate_size
        experts = spec.layers[0].experts
        return cls(
            layer_weights=layers,
            expert_weights=expert,
            num_experts=0 if experts is None else experts.num_experts,
            num_chosen=0 if experts is None else experts.num_experts_per_token,
            head_weights=spec.hidden_size * spec.vocab_size,
            attention_width=spec.query_size * len(spec.layers),
            kv_bytes_per_token=2 * spec.kv_size * len(spec.layers) * dtype.itemsize,
            bytes_per_weight=dtype.itemsize,
        )

    def generation_seconds(self, batch: int, context: int, ceilings: Ceilings) -> float:
        """Of one iteration of ``batch`` generations after ``context`` tokens each: all weights and
        all KV are read once, or everything is multiplied, whichever takes longer. Of experts those
        weights are read that have rows, if each token chooses at random."""
        weights = self.layer_weights + self.head_weights
        num_read = 0.0
        if self.num_chosen:
            unread = (1 - self.num_chosen / self.num_experts) ** batch
            num_read = self.num_experts * (1 - unread)
        read = (weights + num_read * self.expert_weights) * self.bytes_per_weight
        read += batch * context * self.kv_bytes_per_token
        weights += self.num_chosen * self.expert_weights
        flops = 2 * batch * weights + 4 * batch * context * self.attention_width
        return max(read / ceilings.bytes_per_second, flops / ceilings.flops_per_second)

    def context_seconds(self, num_tokens: int, num_prompts: int, ceilings: Ceilings) -> float:
        """Of the contexts of ``num_prompts`` prompts of ``num_tokens`` each, all multiplied; half
        of the scores are of later tokens and not computed."""
        of_token = self.layer_weights + self.num_chosen * self.expert_weights
        linear = 2 * num_tokens * of_token + 2 * self.head_weights
        attention = 2 * num_tokens**2 * self.attention_width
        return num_prompts * (linear + attention) / ceilings.flops_per_second


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy, counted as read and written, and a square product."""
    on_gpu = device.type == "cuda"
    source = torch.ones(1 << (32 if on_gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if on_gpu else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return Ceilings(
        bytes_per_second=2 * source.nbytes / best_seconds(device, lambda: target.copy_(source)),
        flops_per_second=2 * size**3 / best_seconds(device, lambda: left @ right),
    )


def best_seconds(device: torch.device, work: Callable[[], object], repeats: int = 10) -> float:
    """Of single runs, after two that do not count."""
    times = []
    for i in range(repeats + 2):
        seconds = seconds_of(device, work)
        if i >= 2:
            times.append(seconds)
    return min(times)


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """On the device's own clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000
