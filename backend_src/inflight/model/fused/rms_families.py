"""The families of ``families.py`` with RMSNorms."""

from __future__ import annotations

from typing import Any

from inflight.model.fused.description import (
    NORMS_AFTER,
    NORMS_AROUND,
    attention_biases,
    describe,
    gated_mlp,
    window_everywhere,
    windows_by_layer_type,
    without_rope,
)
from inflight.model.fused.spec import DecoderSpec, NormNames, QkNorm, TensorNames


def llama(config: Any, **facts: Any) -> DecoderSpec:
    mlp = gated_mlp(config, config.intermediate_size, has_bias=config.mlp_bias)
    facts = attention_biases(config) | facts
    return describe(config, mlps=[mlp] * config.num_hidden_layers, **facts)


def mistral(config: Any) -> DecoderSpec:
    return describe(config, windows=window_everywhere(config))


def seed_oss(config: Any) -> DecoderSpec:
    return llama(config, output_bias=config.attention_out_bias)


def ernie4_5(config: Any) -> DecoderSpec:
    mlp = gated_mlp(config, config.intermediate_size, has_bias=config.use_bias)
    return describe(
        config,
        mlps=[mlp] * config.num_hidden_layers,
        has_interleaved_rope=True,
        qkv_bias=config.use_bias,
        output_bias=config.use_bias,
    )


def qwen2(config: Any) -> DecoderSpec:
    return describe(config, windows=windows_by_layer_type(config), qkv_bias=True)


def qwen3(config: Any) -> DecoderSpec:
    return describe(
        config,
        windows=windows_by_layer_type(config),
        qk_norm=QkNorm.EACH_HEAD,
        **attention_biases(config),
    )


def smollm3(config: Any) -> DecoderSpec:
    windows = windows_by_layer_type(config) if config.use_sliding_window else None
    return without_rope(llama(config, windows=windows), config.no_rope_layers)


def gemma(config: Any, **facts: Any) -> DecoderSpec:
    return describe(
        config,
        norm_offset=1.0,
        embedding_multiplier=config.hidden_size**0.5,
        **attention_biases(config),
        **facts,
    )


def gemma2(config: Any) -> DecoderSpec:
    return gemma(
        config,
        windows=windows_by_layer_type(config),
        norms=NORMS_AROUND,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logits_softcap=config.final_logit_softcapping,
    )


def gemma3_text(config: Any) -> DecoderSpec:
    """Its configuration has attn_logit_softcapping, and its attention does not use it."""
    return gemma(
        config,
        windows=windows_by_layer_type(config),
        norms=NORMS_AROUND,
        qk_norm=QkNorm.EACH_HEAD,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logits_softcap=config.final_logit_softcapping,
    )


def phi3(config: Any) -> DecoderSpec:
    return describe(
        config,
        windows=window_everywhere(config),
        has_partial_rope=True,
        names=TensorNames(qkv="qkv_proj", gate_up="gate_up_proj"),
    )


def glm4(config: Any) -> DecoderSpec:
    return describe(
        config,
        norms=NormNames(
            before_attention="input_layernorm",
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        names=TensorNames(gate_up="gate_up_proj"),
        has_partial_rope=True,
        has_interleaved_rope=True,
        qkv_bias=config.attention_bias,
    )


def olmo2(config: Any, **facts: Any) -> DecoderSpec:
    facts = attention_biases(config) | facts
    return describe(config, norms=NORMS_AFTER, qk_norm=QkNorm.WHOLE_ROW, **facts)


def olmo3(config: Any) -> DecoderSpec:
    return olmo2(config, windows=windows_by_layer_type(config))


def exaone4(config: Any) -> DecoderSpec:
    """Where some layers have windows, only those have rope."""
    windows = windows_by_layer_type(config)
    spec = describe(config, windows=windows, norms=NORMS_AFTER, qk_norm=QkNorm.EACH_HEAD)
    return spec if config.sliding_window is None else without_rope(spec, windows)


def granite(config: Any) -> DecoderSpec:
    return llama(
        config,
        attention_scale=config.attention_multiplier,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_multiplier=1.0 / config.logits_scaling,
    )
