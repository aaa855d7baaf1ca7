"""How each model type of transformers is a DecoderSpec.

What a class fixes without a word in its configuration stands here, and nowhere else; the facts are
those of the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from inflight.model.architectures import SERVED_LAYER_TYPES
from inflight.model.fused.rope import (
    SCALED_ROPE_TYPES,
    has_rope_by_layer_type,
    rope_spec,
    rope_types,
)
from inflight.model.fused.spec import DecoderSpec, LayerSpec, NormNames, QkNorm, RopeSpec
from inflight.native.attention import MAX_HEAD_DIM
from inflight.native.elementwise import WIDTH_MULTIPLE
from inflight.native.linear import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""By transformers' names."""

NORMS_BEFORE = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
NORMS_AFTER = NormNames(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
NORMS_AROUND = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

Windows = list[int | None]


def can_fuse(hf_config: Any) -> str | None:
    """Why the fused runner cannot run this model; None: it can.

    ``hf_config``: as transformers reads it, with nothing against it in ``check_architecture``.
    """
    return next(_reasons_not_to_fuse(hf_config), None)


def decoder_spec(hf_config: Any) -> DecoderSpec:
    """For a configuration that ``can_fuse`` has nothing against."""
    return _FAMILIES[hf_config.model_type](hf_config)


def _reasons_not_to_fuse(config: Any) -> Iterator[str]:
    if config.model_type not in _FAMILIES:
        yield f"the fused runner does not know {config.model_type}"
        return
    if _activation_name(config) not in ACTIVATIONS:
        yield f"the fused runner has no activation {_activation_name(config)}"
    if set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES:
        yield "the fused runner has full and sliding attention only"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its tokens attend to later ones"
    others = rope_types(config) - SCALED_ROPE_TYPES - {"default"}
    if others:
        yield f"the fused runner has no rope of type {', '.join(sorted(others))}"
    if config.num_attention_heads % config.num_key_value_heads:
        yield (
            f"its {config.num_attention_heads} query heads do not share "
            f"{config.num_key_value_heads} KV heads evenly"
        )
    sizes = (config.hidden_size, config.intermediate_size, _head_dim(config))
    if any(size % WIDTH_MULTIPLE for size in sizes) or _head_dim(config) > MAX_HEAD_DIM:
        yield (
            f"the fused runner needs hidden, intermediate and head sizes in multiples of "
            f"{WIDTH_MULTIPLE} and heads of at most {MAX_HEAD_DIM}, not {sizes}"
        )


def _activation_name(config: Any) -> str:
    # Gemma 2 and 3 have both keys and heed the first.
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act
    return name


def _head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def _spec(
    config: Any, *, windows: Windows | None = None, has_partial_rope: bool = False, **facts: Any
) -> DecoderSpec:
    """A Llama but for ``facts``. ``windows``: of each layer; None: all attention is full."""
    head_dim = _head_dim(config)
    ropes = _ropes(config, has_partial_rope)
    windows = windows or [None] * len(ropes)
    layers = tuple(
        LayerSpec(sliding_window=window, rope=rope)
        for window, rope in zip(windows, ropes, strict=True)
    )
    llama = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "layers": layers,
        "activation": ACTIVATIONS[_activation_name(config)],
        "norms": NORMS_BEFORE,
        "norm_epsilon": config.rms_norm_eps,
        "attention_scale": head_dim**-0.5,
        "has_tied_head": bool(config.tie_word_embeddings),
    }
    return DecoderSpec(**(llama | facts))


def _ropes(config: Any, is_partial: bool) -> list[RopeSpec | None]:
    """Of each layer."""
    if not has_rope_by_layer_type(config):
        return [rope_spec(config, None, is_partial=is_partial)] * config.num_hidden_layers
    by_type = {
        name: rope_spec(config, name, is_partial=is_partial) for name in set(config.layer_types)
    }
    return [by_type[name] for name in config.layer_types]


def _windows_by_layer_type(config: Any) -> Windows:
    return [
        config.sliding_window if name == "sliding_attention" else None
        for name in config.layer_types
    ]


def _window_everywhere(config: Any) -> Windows:
    return [config.sliding_window] * config.num_hidden_layers


def _attention_biases(config: Any) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "output_bias": config.attention_bias}


def _llama(config: Any, **facts: Any) -> DecoderSpec:
    facts = _attention_biases(config) | {"mlp_bias": config.mlp_bias} | facts
    return _spec(config, **facts)


def _mistral(config: Any) -> DecoderSpec:
    return _spec(config, windows=_window_everywhere(config))


def _qwen2(config: Any) -> DecoderSpec:
    return _spec(config, windows=_windows_by_layer_type(config), qkv_bias=True)


def _qwen3(config: Any) -> DecoderSpec:
    return _spec(
        config,
        windows=_windows_by_layer_type(config),
        qk_norm=QkNorm.EACH_HEAD,
        **_attention_biases(config),
    )


def _smollm3(config: Any) -> DecoderSpec:
    spec = _llama(
        config, windows=_windows_by_layer_type(config) if config.use_sliding_window else None
    )
    layers = tuple(
        layer if has_rope else LayerSpec(sliding_window=layer.sliding_window, rope=None)
        for layer, has_rope in zip(spec.layers, config.no_rope_layers, strict=True)
    )
    return replace(spec, layers=layers)


def _gemma(config: Any, **facts: Any) -> DecoderSpec:
    return _spec(
        config,
        norm_offset=1.0,
        embedding_multiplier=config.hidden_size**0.5,
        **_attention_biases(config),
        **facts,
    )


def _gemma2(config: Any) -> DecoderSpec:
    return _gemma(
        config,
        windows=_windows_by_layer_type(config),
        norms=NORMS_AROUND,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logits_softcap=config.final_logit_softcapping,
    )


def _gemma3(config: Any) -> DecoderSpec:
    """Its configuration has attn_logit_softcapping, and its attention does not use it."""
    return _gemma(
        config,
        windows=_windows_by_layer_type(config),
        norms=NORMS_AROUND,
        qk_norm=QkNorm.EACH_HEAD,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logits_softcap=config.final_logit_softcapping,
    )


def _phi3(config: Any) -> DecoderSpec:
    return _spec(
        config, windows=_window_everywhere(config), has_partial_rope=True, has_fused_names=True
    )


def _olmo2(config: Any) -> DecoderSpec:
    return _spec(config, norms=NORMS_AFTER, qk_norm=QkNorm.WHOLE_ROW, **_attention_biases(config))


def _granite(config: Any) -> DecoderSpec:
    return _llama(
        config,
        attention_scale=config.attention_multiplier,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_multiplier=1.0 / config.logits_scaling,
    )


_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}

FUSED_MODEL_TYPES = frozenset(_FAMILIES)
"""Model types with a description; of some checkpoints ``can_fuse`` still says no."""
