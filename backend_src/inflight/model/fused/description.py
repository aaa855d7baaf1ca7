"""From transformers' configurations to the parts of a DecoderSpec: what the families share.

A decoder is described as a Llama but for the facts that its family states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from inflight.model.fused.rope import (
    SCALED_ROPE_TYPES,
    has_rope_by_layer_type,
    rope_spec,
    rope_types,
)
from inflight.model.fused.spec import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormNames,
    RopeSpec,
)
from inflight.native.attention import MAX_HEAD_DIM
from inflight.native.elementwise import WIDTH_MULTIPLE, PlainActivation
from inflight.native.linear import Activation

GATED_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""By transformers' names; as the next."""
PLAIN_ACTIVATIONS: Mapping[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

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
NORM_OF_BOTH = NormNames(before_attention="input_layernorm", before_mlp="input_layernorm")
"""Of layers whose attention and MLP read the same."""

Windows = list[int | None]
"""Of each layer; None: its attention is full."""


class CannotFuseError(ValueError):
    """The fused runner cannot run a model; the text says why."""


def refuse_if(condition: object, reason: str) -> None:
    if condition:
        raise CannotFuseError(reason)


def describe(
    config: Any,
    *,
    windows: Windows | None = None,
    mlps: list[MlpSpec | None] | None = None,
    experts: list[ExpertsSpec | None] | None = None,
    has_partial_rope: bool = False,
    **facts: Any,
) -> DecoderSpec:
    """A Llama but for what is given; the lists have an item for each layer, and None stands for
    full attention, a gated MLP everywhere and no experts. Raises CannotFuseError."""
    _check_attention(config)
    num_layers = config.num_hidden_layers
    layers = zip(
        windows or [None] * num_layers,
        _ropes(config, has_partial_rope),
        mlps or [gated_mlp(config, config.intermediate_size)] * num_layers,
        experts or [None] * num_layers,
        strict=True,
    )
    llama = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": _num_kv_heads(config),
        "head_dim": _head_dim(config),
        "max_position_embeddings": config.max_position_embeddings,
        "layers": tuple(
            LayerSpec(sliding_window=window, rope=rope, mlp=mlp, experts=expert)
            for window, rope, mlp, expert in layers
        ),
        "norms": NORMS_BEFORE,
        "attention_scale": _head_dim(config) ** -0.5,
        "has_tied_head": bool(config.tie_word_embeddings),
    }
    if "norm_epsilon" not in facts:
        llama["norm_epsilon"] = config.rms_norm_eps
    spec = DecoderSpec(**(llama | facts))
    _check_sizes(spec)
    return spec


def gated_mlp(config: Any, intermediate_size: int, *, has_bias: bool = False) -> MlpSpec:
    name = _activation_name(config)
    refuse_if(name not in GATED_ACTIVATIONS, f"the fused runner has no gated activation {name}")
    return MlpSpec(
        intermediate_size=intermediate_size, activation=GATED_ACTIVATIONS[name], has_bias=has_bias
    )


def plain_mlps(config: Any, *, has_bias: bool) -> list[MlpSpec | None]:
    """Without gates, one for each layer."""
    name = _activation_name(config)
    refuse_if(name not in PLAIN_ACTIVATIONS, f"the fused runner has no activation {name}")
    mlp = MlpSpec(
        intermediate_size=config.intermediate_size,
        activation=PLAIN_ACTIVATIONS[name],
        is_gated=False,
        has_bias=has_bias,
    )
    return [mlp] * config.num_hidden_layers


def attention_biases(config: Any) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "output_bias": config.attention_bias}


def windows_by_layer_type(config: Any) -> Windows:
    return [
        config.sliding_window if name == "sliding_attention" else None
        for name in config.layer_types
    ]


def window_everywhere(config: Any) -> Windows:
    return [config.sliding_window] * config.num_hidden_layers


def without_rope(spec: DecoderSpec, has_rope: Iterable[object]) -> DecoderSpec:
    """``has_rope``: of each layer."""
    layers = zip(spec.layers, has_rope, strict=True)
    return replace(
        spec, layers=tuple(layer if has else replace(layer, rope=None) for layer, has in layers)
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


def _num_kv_heads(config: Any) -> int:
    # Types whose every query head has its own KV head have no key for it.
    number: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return number


def _ropes(config: Any, is_partial: bool) -> list[RopeSpec | None]:
    """Of each layer."""
    if not has_rope_by_layer_type(config):
        return [rope_spec(config, None, is_partial=is_partial)] * config.num_hidden_layers
    by_type = {
        name: rope_spec(config, name, is_partial=is_partial) for name in set(config.layer_types)
    }
    return [by_type[name] for name in config.layer_types]


def _check_attention(config: Any) -> None:
    refuse_if(
        getattr(config, "use_bidirectional_attention", None), "its tokens attend to later ones"
    )
    others = rope_types(config) - SCALED_ROPE_TYPES - {"default"}
    refuse_if(others, f"the fused runner has no rope of type {', '.join(sorted(others))}")
    num_heads, num_kv_heads = config.num_attention_heads, _num_kv_heads(config)
    refuse_if(
        num_heads % num_kv_heads,
        f"its {num_heads} query heads do not share {num_kv_heads} KV heads evenly",
    )


def _check_sizes(spec: DecoderSpec) -> None:
    mlps = [layer.mlp for layer in spec.layers]
    mlps += [layer.experts.mlp for layer in spec.layers if layer.experts is not None]
    intermediate = sorted({mlp.intermediate_size for mlp in mlps if mlp is not None})
    sizes = (spec.hidden_size, *intermediate, spec.head_dim)
    refuse_if(
        any(size % WIDTH_MULTIPLE for size in sizes) or spec.head_dim > MAX_HEAD_DIM,
        f"the fused runner needs hidden, intermediate and head sizes in multiples of "
        f"{WIDTH_MULTIPLE} and heads of at most {MAX_HEAD_DIM}, not {sizes}",
    )
