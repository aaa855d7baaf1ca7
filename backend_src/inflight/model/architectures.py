"""Which checkpoints are served: by model type, and by what a configuration says of itself.

Driving transformers' classes packed is right for a decoder whose tokens meet each other in
attention alone, and whose attention goes through transformers' attention interface. Some that
break this rule would run and give wrong text, so they are refused here, by name. What is neither
proved nor refused is served if it passes the probe (``probe.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inflight.errors import CheckpointError

PROVED = frozenset({
    "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "mistral",
    "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types whose packed, chunked, mixed logits the tests compare with the plain forward."""

_BYPASSES = "its attention does not go through transformers' attention interface"
_RECURRENT = "its layers carry a recurrent state, which packed sequences would share"
_CHUNKED = "its chunked attention is not passed on to the attention interface"

REFUSED: Mapping[str, str] = {
    "bloom": _BYPASSES,
    "falcon": _BYPASSES,
    "mpt": _BYPASSES,
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    **dict.fromkeys(
        (
            "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "minimax",
            "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma",
            "rwkv", "xlstm", "zamba", "zamba2",
        ),
        _RECURRENT,
    ),
}  # fmt: skip
"""Model types that are never served, with the reason."""

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_BATCH_DEPENDENT_ROPE = {
    "longrope": "longrope chooses its factors by the longest position in the batch",
    "dynamic": "dynamic NTK scales rope by the longest position in the batch",
}


def check_architecture(config: Any) -> None:
    """Raises CheckpointError that names the architecture and the reason, if it is not served.

    ``config``: the checkpoint's configuration as transformers reads it; no weights are needed.
    """
    for reason in _reasons_to_refuse(config):
        raise CheckpointError(f"architecture {config.model_type} is not served: {reason}")


def _reasons_to_refuse(config: Any) -> Iterator[str]:
    if config.model_type in REFUSED:
        yield REFUSED[config.model_type]
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model, and only decoders are served"
    if config.get_text_config() is not config:
        yield "it is a multimodal model, and only text models are served"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised; serve the checkpoint it was made from"
    if getattr(config, "index_topk", None) is not None:
        yield "its sparse attention chooses keys with an indexer outside the attention interface"
    others = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if others:
        yield f"it has layers of type {', '.join(sorted(others))}"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            yield f"its rope_type is {rope_type}: {_BATCH_DEPENDENT_ROPE[rope_type]}"


def _rope_types(rope_parameters: Any) -> Iterator[str]:
    """Of ``rope_parameters``, which is one mapping or one for each layer type."""
    if not isinstance(rope_parameters, Mapping):
        return
    for value in (rope_parameters, *rope_parameters.values()):
        if isinstance(value, Mapping) and isinstance(value.get("rope_type"), str):
            yield value["rope_type"]
