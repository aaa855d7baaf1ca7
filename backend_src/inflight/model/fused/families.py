"""How each model type of transformers is a DecoderSpec.

What a class fixes without a word in its configuration stands in the functions of this table, and
nowhere else; the facts are those of the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight.model.architectures import SERVED_LAYER_TYPES
from inflight.model.fused import expert_families as experts
from inflight.model.fused import layer_norm_families as layer_norm
from inflight.model.fused import rms_families as rms
from inflight.model.fused.description import CannotFuseError, refuse_if
from inflight.model.fused.spec import DecoderSpec

_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "cohere": layer_norm.cohere,
    "cohere2": layer_norm.cohere2,
    "ernie4_5": rms.ernie4_5,
    "exaone4": rms.exaone4,
    "gemma": rms.gemma,
    "gemma2": rms.gemma2,
    "gemma3_text": rms.gemma3_text,
    "glm4": rms.glm4,
    "gpt_neox": layer_norm.gpt_neox,
    "granite": rms.granite,
    "llama": rms.llama,
    "mistral": rms.mistral,
    "mixtral": experts.mixtral,
    "nemotron": layer_norm.nemotron,
    "olmo2": rms.olmo2,
    "olmo3": rms.olmo3,
    "olmoe": experts.olmoe,
    "phi": layer_norm.phi,
    "phi3": rms.phi3,
    "qwen2": rms.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": rms.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "seed_oss": rms.seed_oss,
    "smollm3": rms.smollm3,
    "stablelm": layer_norm.stablelm,
    "starcoder2": layer_norm.starcoder2,
}

FUSED_MODEL_TYPES = frozenset(_FAMILIES)
"""Model types with a description; of some checkpoints ``can_fuse`` still says no."""


def can_fuse(hf_config: Any) -> str | None:
    """Why the fused runner cannot run this model; None: it can.

    ``hf_config``: as transformers reads it, with nothing against it in ``check_architecture``.
    """
    try:
        decoder_spec(hf_config)
    except CannotFuseError as reason:
        return str(reason)
    return None


def decoder_spec(hf_config: Any) -> DecoderSpec:
    """Raises CannotFuseError where ``can_fuse`` has something against it."""
    model_type = hf_config.model_type
    refuse_if(model_type not in _FAMILIES, f"the fused runner does not know {model_type}")
    others = set(getattr(hf_config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    refuse_if(others, "the fused runner has full and sliding attention only")
    return _FAMILIES[model_type](hf_config)
