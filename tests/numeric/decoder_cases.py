"""Tiny decoders of every kind that the fused runners know, and how their logits are compared with
transformers' plain forward: packed, chunked and mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from inflight.model.fused.families import FUSED_MODEL_TYPES
from inflight.model.runner import ModelRunner
from tests.fakes.tiny_models import SLIDING_WINDOW, VOCAB_SIZE
from tests.numeric.packed_driver import (
    logits_of_all_rows,
    request_of,
    shuffled_block_tables,
    staggered_plans,
)

LENGTHS = (41, 17, 9, 34)
PROMPT_LENGTHS = (33, 9, 4, 20)
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 16


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_PRETRAINED_FOR_64 = {"original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{model_type: (model_type, {}) for model_type in sorted(FUSED_MODEL_TYPES)},
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama of other head sizes": ("llama", {"head_dim": 48, "num_key_value_heads": 4}),
    "linear rope": ("llama", rope("linear", factor=3.0)),
    "llama3 rope": (
        "llama",
        rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_PRETRAINED_FOR_64),
    ),
    "yarn rope": ("llama", rope("yarn", factor=2.0, **_PRETRAINED_FOR_64)),
    "llama ignores partial rope": ("llama", rope("default", partial_rotary_factor=0.5)),
    "phi3 with partial rope": ("phi3", {"head_dim": 32, "partial_rotary_factor": 0.4}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "layer_types": None},
    ),
    "gemma3 with scaled rope on full layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "granite with multipliers": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "rms_norm_eps": 0.1,
        },
    ),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "ernie4_5 with biases": ("ernie4_5", {"use_bias": True, "head_dim": 32}),
    "cohere with biases and a scale": ("cohere", {"attention_bias": True, "logit_scale": 0.3}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "relu"}),
    "nemotron with biases": ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "mixtral with windows": ("mixtral", {"sliding_window": SLIDING_WINDOW}),
    "mixtral with one expert for each token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral with every expert for each token": ("mixtral", {"num_experts_per_tok": 4}),
    "olmoe with a softmax of the chosen": ("olmoe", {"norm_topk_prob": True}),
    "qwen2_moe with layers without experts": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2_moe with windows": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe with layers without experts": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
}


def plain_logits(
    directory: Path, sequences: list[npt.NDArray[np.int64]], dtype: torch.dtype = torch.float32
) -> npt.NDArray[np.float32]:
    """transformers alone, a sequence at a time: rows one after the other."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        rows = [model(torch.from_numpy(s)[None], use_cache=False).logits[0] for s in sequences]
    return torch.cat(rows).float().numpy()


def random_sequences() -> list[npt.NDArray[np.int64]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB_SIZE, size=length) for length in LENGTHS]


def packed_logits(
    runner: ModelRunner,
    sequences: list[npt.NDArray[np.int64]],
    fill: Callable[[float], None],
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
) -> npt.NDArray[np.float32]:
    """Contexts in chunks beside generations, in storage that ``fill`` fills with NaN at first."""
    lengths = [len(tokens) for tokens in sequences]
    runner.allocate_kv_cache(NUM_BLOCKS, TOKENS_PER_BLOCK)
    fill(float("nan"))
    logits = logits_of_all_rows(
        runner,
        staggered_plans(
            [request_of(i, tokens) for i, tokens in enumerate(sequences)],
            prompt_lengths,
            chunk=11,
            most_context_tokens=19,
        ),
        shuffled_block_tables(lengths, TOKENS_PER_BLOCK, NUM_BLOCKS, seed=3),
        TOKENS_PER_BLOCK,
    )
    assert len(logits) == sum(lengths)
    return np.stack([logits[key] for key in sorted(logits)])
