"""Tiny random checkpoints of many architectures, saved as real Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 256
SLIDING_WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_SLIDING = {"sliding_window": SLIDING_WINDOW}
_MIXED_LAYERS = {
    **_SLIDING,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_GRANITE = {
    # As published, attention_multiplier for heads of 16. transformers' own defaults are all 1: then
    # scores of random weights are so sharp that rounding alone decides what a row attends to.
    "attention_multiplier": 1 / 16,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

PROVED_CONFIGS: dict[str, dict[str, Any]] = {
    "cohere": _COMMON,
    "cohere2": _COMMON | _MIXED_LAYERS,
    "deepseek_v3": _COMMON | _MLA,
    "ernie4_5": _COMMON,
    "exaone4": _COMMON | _MIXED_LAYERS,
    "gemma": _COMMON | {"head_dim": 16},
    "gemma2": _COMMON
    | _MIXED_LAYERS
    | {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": _COMMON | _MIXED_LAYERS | {"head_dim": 16},
    "glm4": _COMMON | {"head_dim": 16},
    "gpt2": _GPT2 | {"n_inner": 96},
    "gpt_bigcode": _GPT2 | {"multi_query": True},
    "gpt_neox": _GPT2,
    "gpt_oss": _COMMON | _MIXED_LAYERS | {"head_dim": 16, "num_local_experts": 4},
    "gptj": _GPT2 | {"rotary_dim": 8},
    "granite": _COMMON | _GRANITE,
    "llama": _COMMON,
    "mistral": _COMMON | _SLIDING,
    "mixtral": _COMMON | {"num_local_experts": 4},
    "nemotron": _COMMON,
    "olmo2": _COMMON,
    "olmo3": _COMMON | _MIXED_LAYERS,
    "olmoe": _COMMON | _EXPERTS,
    "opt": _GPT2 | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _GPT2,
    "phi": _COMMON,
    "phi3": _COMMON | _SLIDING,
    "qwen2": _COMMON | _MIXED_LAYERS | {"use_sliding_window": True},
    "qwen2_moe": _COMMON | _EXPERTS,
    "qwen3": _COMMON | {"head_dim": 16},
    "qwen3_moe": _COMMON | _EXPERTS | {"head_dim": 16},
    "seed_oss": _COMMON | {"head_dim": 16},
    "smollm3": _COMMON | {"no_rope_layers": [1, 0, 1]},
    "stablelm": _COMMON,
    "starcoder2": _COMMON | _SLIDING,
}
"""Arguments of a tiny configuration for each architecture that Inflight promises to serve."""


def tiny_config(model_type: str, **changes: Any) -> Any:
    arguments = PROVED_CONFIGS.get(model_type, _COMMON) | changes
    return AutoConfig.for_model(model_type, **arguments)


def save_tiny_checkpoint(directory: Path, config: Any, *, seed: int = 0) -> Path:
    """Saves a model of ``config`` in fp32, with weights large enough that context shows in every
    logit (transformers' own start values leave a model almost blind to it)."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.15 * noise)
    model.save_pretrained(directory)
    return directory


def tiny_checkpoint(directory: Path, model_type: str = "llama", *, seed: int = 0) -> Path:
    """A folder with config.json and weights, no tokenizer."""
    return save_tiny_checkpoint(directory, tiny_config(model_type), seed=seed)
