"""ModelShape: the sizes of a model that its memory and its speed follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.errors import ConfigError

_MOST = 1 << 24
"""No size in a config.json is larger."""

_SCALE_BYTES = 4
"""int8 KV has an fp32 scale for each token, KV head and of K or V."""

_WEIGHT_BYTES = {
    "auto": 2.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "int8": 1.125, "int4": 0.625, "fp8": 1.0,
}  # fmt: skip
"""Bytes of a weight; int8 and int4 have an fp32 scale for each block of 32."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVE_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated feed-forward layers; bytes are in the dtypes it is served in."""

    num_layers: int
    attention_channels: int
    """Attention heads x head_dim, summed over all layers."""
    num_weights: int
    num_active_weights: int
    """Those that one row is multiplied with: of experts only the chosen ones, of the embedding
    only the output side."""
    bytes_per_weight: float
    kv_bytes_per_token: int
    """K and V of one token over all layers. Sliding windows count as full attention."""
    max_position_embeddings: int

    @property
    def weight_bytes(self) -> int:
        return int(self.num_weights * self.bytes_per_weight)

    def with_weights(self, num_weights: int) -> ModelShape:
        """With a number of weights that was counted, not estimated."""
        return replace(self, num_weights=num_weights)

    @classmethod
    def of(cls, config: Mapping[str, Any], *, dtype: str, kv_cache_dtype: str) -> ModelShape:
        """``config``: config.json; the dtypes are the configuration keys' values. Where the file
        does not say whether feed-forward layers are gated they are taken to be. Raises ConfigError
        that names the key."""
        sizes = _Sizes(config)
        layers = sizes.get("num_hidden_layers", "n_layer")
        hidden = sizes.get("hidden_size", "n_embd")
        heads = sizes.get("num_attention_heads", "n_head")
        kv_heads = sizes.get("num_key_value_heads", default=heads)
        head_dim = sizes.get("head_dim", default=max(1, hidden // heads))
        width = sizes.get("moe_intermediate_size", "intermediate_size", default=4 * hidden)
        experts = sizes.get(*_EXPERT_KEYS, default=1)
        active = sizes.get(*_ACTIVE_EXPERT_KEYS, default=1)
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        expert = 3 * hidden * width
        embedding = sizes.get("vocab_size") * hidden
        num_embeddings = 1 if sizes.is_true("tie_word_embeddings") else 2
        num_weights = layers * (attention + experts * expert) + num_embeddings * embedding
        return cls(
            num_layers=layers,
            attention_channels=layers * heads * head_dim,
            num_weights=num_weights,
            num_active_weights=layers * (attention + active * expert) + embedding,
            bytes_per_weight=_WEIGHT_BYTES[dtype],
            kv_bytes_per_token=2 * layers * kv_heads * _head_bytes(head_dim, dtype, kv_cache_dtype),
            max_position_embeddings=sizes.get(
                "max_position_embeddings", "n_positions", default=_MOST
            ),
        )


EMBEDDED_MODEL = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
"""SmolLM2-135M-Instruct, so that its GGUF need not be converted to size it."""


def _head_bytes(head_dim: int, dtype: str, kv_cache_dtype: str) -> int:
    if kv_cache_dtype == "int8":
        return head_dim + _SCALE_BYTES
    wide = kv_cache_dtype == "fp32" or (kv_cache_dtype == "auto" and dtype == "fp32")
    return head_dim * (4 if wide else 2)


class _Sizes:
    """Whole numbers of a config.json; multimodal ones nest them in ``text_config``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        self._levels = (config, nested if isinstance(nested, dict) else {})

    def get(self, *names: str, default: int | None = None) -> int:
        for level in self._levels:
            for name in names:
                if level.get(name) is not None:
                    return self._checked(name, level[name])
        if default is None:
            raise ConfigError(f"config.json: {names[0]} is missing")
        return default

    def is_true(self, name: str) -> bool:
        return any(level.get(name) is True for level in self._levels)

    def _checked(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ConfigError(f"config.json: {name}: {str(value)[:40]} must be from 1 to {_MOST}")
        return value
