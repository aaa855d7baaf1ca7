"""The families of ``families.py`` with LayerNorms."""

from __future__ import annotations

from typing import Any

from inflight.model.fused.description import (
    NORM_OF_BOTH,
    NORMS_BEFORE,
    attention_biases,
    describe,
    plain_mlps,
    refuse_if,
    window_everywhere,
    windows_by_layer_type,
    without_rope,
)
from inflight.model.fused.spec import DecoderSpec, NormKind, TensorNames


def cohere(config: Any, **facts: Any) -> DecoderSpec:
    refuse_if(getattr(config, "use_qk_norm", False), "its queries and keys have LayerNorms")
    return describe(
        config,
        norms=NORM_OF_BOTH,
        norm_kind=NormKind.LAYER,
        norm_epsilon=config.layer_norm_eps,
        is_parallel=True,
        has_interleaved_rope=True,
        logits_multiplier=config.logit_scale,
        **attention_biases(config),
        **facts,
    )


def cohere2(config: Any) -> DecoderSpec:
    """Only layers with windows have rope."""
    windows = windows_by_layer_type(config)
    return without_rope(cohere(config, windows=windows), windows)


def stablelm(config: Any) -> DecoderSpec:
    refuse_if(config.qk_layernorm, "its queries and keys have LayerNorms")
    return describe(
        config,
        norms=NORM_OF_BOTH if config.use_parallel_residual else NORMS_BEFORE,
        norm_kind=NormKind.LAYER,
        norm_bias=True,
        norm_epsilon=config.layer_norm_eps,
        is_parallel=config.use_parallel_residual,
        has_partial_rope=True,
        qkv_bias=config.use_qkv_bias,
    )


def starcoder2(config: Any) -> DecoderSpec:
    return describe(
        config,
        windows=window_everywhere(config),
        mlps=plain_mlps(config, has_bias=config.use_bias),
        names=TensorNames(up="c_fc", down="c_proj"),
        norm_kind=NormKind.LAYER,
        norm_bias=True,
        norm_epsilon=config.norm_epsilon,
        qkv_bias=config.use_bias,
        output_bias=config.use_bias,
    )


def nemotron(config: Any) -> DecoderSpec:
    return describe(
        config,
        mlps=plain_mlps(config, has_bias=config.mlp_bias),
        norm_kind=NormKind.LAYER,
        norm_bias=True,
        norm_offset=1.0,
        norm_epsilon=config.norm_eps,
        has_partial_rope=True,
        **attention_biases(config),
    )


def phi(config: Any) -> DecoderSpec:
    refuse_if(config.qk_layernorm, "its queries and keys have LayerNorms")
    return describe(
        config,
        mlps=plain_mlps(config, has_bias=True),
        names=TensorNames(final_norm="model.final_layernorm", output="dense", up="fc1", down="fc2"),
        norms=NORM_OF_BOTH,
        norm_kind=NormKind.LAYER,
        norm_bias=True,
        norm_epsilon=config.layer_norm_eps,
        is_parallel=True,
        has_partial_rope=True,
        qkv_bias=True,
        output_bias=True,
        head_bias=True,
    )


def gpt_neox(config: Any) -> DecoderSpec:
    return describe(
        config,
        mlps=plain_mlps(config, has_bias=True),
        names=TensorNames(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            final_norm="gpt_neox.final_layer_norm",
            head="embed_out",
            attention="attention",
            qkv="query_key_value",
            output="dense",
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
        norm_kind=NormKind.LAYER,
        norm_bias=True,
        norm_epsilon=config.layer_norm_eps,
        is_parallel=config.use_parallel_residual,
        has_partial_rope=True,
        has_qkv_by_head=True,
        **attention_biases(config),
    )
