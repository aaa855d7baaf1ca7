"""From transformers' rope_parameters to RopeSpecs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.model.fused.spec import RopeSpec

SCALED_ROPE_TYPES = frozenset({"linear", "llama3", "yarn"})
"""Those of transformers' functions whose frequencies depend on the configuration alone."""


def rope_spec(config: Any, layer_type: str | None, *, is_partial: bool) -> RopeSpec:
    """``layer_type``: whose parameters, where each type of layer has its own; else None.

    ``is_partial``: the class heeds partial_rotary_factor also where rope is not scaled.
    """
    parameters = parameters_of(config, layer_type)
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        share = parameters.get("partial_rotary_factor", 1.0) if is_partial else 1.0
        rotary_dim = int(head_dim * share)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        assert rope_type in SCALED_ROPE_TYPES
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, **options)
    return RopeSpec(inverse_frequencies=tuple(frequencies.tolist()), attention_factor=float(factor))


def has_rope_by_layer_type(config: Any) -> bool:
    return any(isinstance(value, Mapping) for value in config.rope_parameters.values())


def rope_types(config: Any) -> set[str]:
    """Of all layers."""
    names = set(config.layer_types) if has_rope_by_layer_type(config) else {None}
    return {parameters_of(config, name)["rope_type"] for name in names}


def parameters_of(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]
