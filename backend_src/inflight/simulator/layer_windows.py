"""windows_of: which layers of a model have a sliding window, as far as its config.json tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALL_LAYERS = {"mistral", "mixtral", "phi3", "starcoder2"}
"""Model types whose window is that of every layer."""


def windows_of(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Of each layer. Where the file leaves it to the code of the model type, and we do not know
    that, None: memory is then sized for more than is held. ``config``: of the language model."""
    window = config.get("sliding_window")
    if type(window) is not int or window < 1 or config.get("use_sliding_window") is False:
        return [None] * num_layers
    return [window if slides else None for slides in _slide(config, num_layers)]


def _slide(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    layers = range(num_layers)
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return [each == "sliding_attention" for each in types]
    pattern, first = config.get("sliding_window_pattern"), config.get("max_window_layers")
    if type(pattern) is int and pattern > 1:
        return [(layer + 1) % pattern != 0 for layer in layers]
    if type(first) is int and config.get("use_sliding_window") is True:
        return [layer >= first for layer in layers]
    model_type = config.get("model_type")
    if model_type == "gemma2":
        return [layer % 2 == 0 for layer in layers]
    return [model_type in _ALL_LAYERS] * num_layers
