"""The families of ``families.py`` whose layers have experts."""

from __future__ import annotations

from typing import Any

from inflight.model.fused.description import (
    attention_biases,
    describe,
    gated_mlp,
    refuse_if,
    window_everywhere,
    windows_by_layer_type,
)
from inflight.model.fused.spec import DecoderSpec, ExpertsSpec, MlpSpec, QkNorm, TensorNames


def mixtral(config: Any) -> DecoderSpec:
    mixture = _mixture(
        config, config.num_local_experts, config.intermediate_size, is_softmax_of_chosen=True
    )
    return describe(
        config,
        windows=window_everywhere(config),
        mlps=[None] * config.num_hidden_layers,
        experts=[mixture] * config.num_hidden_layers,
        names=TensorNames(
            gate="w1",
            up="w3",
            down="w2",
            experts="block_sparse_moe.experts",
            router="block_sparse_moe.gate",
        ),
    )


def olmoe(config: Any) -> DecoderSpec:
    refuse_if(config.clip_qkv is not None, "its queries, keys and values are clipped")
    mixture = _mixture(
        config,
        config.num_experts,
        config.intermediate_size,
        is_softmax_of_chosen=config.norm_topk_prob,
    )
    return describe(
        config,
        mlps=[None] * config.num_hidden_layers,
        experts=[mixture] * config.num_hidden_layers,
        qk_norm=QkNorm.WHOLE_ROW,
        **attention_biases(config),
    )


def qwen2_moe(config: Any) -> DecoderSpec:
    shared_expert = gated_mlp(config, config.shared_expert_intermediate_size)
    return _qwen_moe(
        config,
        shared_expert,
        windows=windows_by_layer_type(config),
        qkv_bias=config.qkv_bias,
    )


def qwen3_moe(config: Any) -> DecoderSpec:
    return _qwen_moe(
        config,
        None,
        windows=window_everywhere(config),
        qk_norm=QkNorm.EACH_HEAD,
        **attention_biases(config),
    )


def _qwen_moe(config: Any, shared_expert: MlpSpec | None, **facts: Any) -> DecoderSpec:
    """Some layers may have an MLP in place of experts."""
    mixture = _mixture(
        config,
        config.num_experts,
        config.moe_intermediate_size,
        is_softmax_of_chosen=config.norm_topk_prob,
    )
    mlp = gated_mlp(config, config.intermediate_size)
    has_experts = [
        i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0
        for i in range(config.num_hidden_layers)
    ]
    return describe(
        config,
        mlps=[shared_expert if has else mlp for has in has_experts],
        experts=[mixture if has else None for has in has_experts],
        **facts,
    )


def _mixture(
    config: Any, num_experts: int, intermediate_size: int, *, is_softmax_of_chosen: bool
) -> ExpertsSpec:
    num_chosen = config.num_experts_per_tok
    refuse_if(
        not 1 <= num_chosen <= num_experts, f"{num_chosen} of {num_experts} experts run a token"
    )
    return ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        mlp=gated_mlp(config, intermediate_size),
        is_softmax_of_chosen=is_softmax_of_chosen,
    )
