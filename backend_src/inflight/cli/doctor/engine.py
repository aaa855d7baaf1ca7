"""The engine: its libraries, the checkpoint, who runs it, and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.api.config import InflightConfig
from inflight.checkpoint.locate import Job, locate
from inflight.cli.doctor.accelerator import installed_version
from inflight.cli.doctor.finding import Finding, Status, size_text
from inflight.cli.memory import available_memory
from inflight.cli.sizing import executor_limits, model_shape
from inflight.engine.memory import TYPICAL_SEQ_LEN, num_kv_blocks
from inflight.errors import ConfigError

_LIBRARIES = ("torch", "transformers", "tokenizers")
_CONVERTED_BYTES_PER_WEIGHT = 4
_JOBS = {
    None: "it is served as it lies",
    Job.GGUF: "it is converted once",
    Job.TOKENIZER: "its tokenizer is converted once",
    Job.CONFIG: "its configuration is completed once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the engine computes on."""

    has_gpu: bool
    """torch would take a card."""
    has_compiler: bool
    has_triton: bool
    """Triton's language can be imported."""


def look_at_libraries() -> Finding:
    """What the engine cannot do without; nothing is imported."""
    versions = {name: installed_version(name) for name in _LIBRARIES}
    missing = [name for name, number in versions.items() if number is None]
    found = ", ".join(f"{name} {number or 'is missing'}" for name, number in versions.items())
    if not missing:
        return Finding(what="libraries", found=found, means="the engine can be loaded")
    return Finding(
        what="libraries",
        found=found,
        means="the engine cannot be loaded",
        status=Status.BAD,
        remedy=f"pip install {' '.join(missing)}",
    )


def look_at_checkpoint(config: InflightConfig) -> Finding:
    """What ``model_dir`` names. Raises CheckpointError where it names nothing that is served."""
    source = locate(config.model_dir)
    return Finding(what="checkpoint", found=str(source.path), means=_JOBS[source.job])


def look_at_runner(config: InflightConfig, place: Place) -> Finding:
    """Which of the runners and attentions there are here, and which the configuration takes.

    The last word has the checkpoint: what the fused runner does not know runs on transformers'
    classes.
    """
    there = ["hf on torch attention"]
    if place.has_compiler:
        there.insert(0, "hf on native attention")
        there.insert(0, "fused on native kernels")
    taken, means = _taken(config, place)
    slow = taken.startswith("hf") and config.runner != "hf"
    return Finding(
        what="runner",
        found=f"here: {', '.join(there)}; runner {config.runner} takes {taken}",
        means=means,
        status=Status.NOTE if slow else Status.GOOD,
    )


def _taken(config: InflightConfig, place: Place) -> tuple[str, str]:
    if config.runner == "hf":
        return "hf", "transformers' classes, the slower runner, as the configuration says"
    if place.has_gpu:
        return "hf on torch attention", "transformers' classes compute on the card"
    if not place.has_compiler:
        return "hf on torch attention", "without native kernels, slower"
    if config.attention_backend == "torch" or config.dtype == "fp16":
        key = "dtype" if config.dtype == "fp16" else "attention_backend"
        return "hf on torch attention", f"because of {key}, slower"
    return "fused on native kernels", "the fast one, for the architectures it knows"


def look_at_memory(config: InflightConfig, card_free_bytes: int | None) -> Finding:
    """Weights, KV cache, and the requests that fit. ``card_free_bytes``: None without a card.

    Raises ConfigError where the checkpoint cannot be sized.
    """
    free = available_memory() if card_free_bytes is None else card_free_bytes
    where = "memory" if card_free_bytes is None else "memory of the card"
    model = model_shape(config)
    weights = size_text(model.weight_bytes)
    found = f"{size_text(free)} of {where} available, weights take {weights}"
    limits = executor_limits(config, model)
    try:
        blocks, bound = num_kv_blocks(
            limits,
            kv_bytes_per_token=model.kv_bytes_per_token,
            free_bytes=free - model.weight_bytes,
        )
    except ConfigError as error:
        return Finding(
            what="memory",
            found=found,
            means=f"weights and KV cache do not fit: {error}",
            status=Status.BAD,
            remedy="a smaller checkpoint, or --dtype int8",
        )
    per_block = limits.kv_cache_config.tokens_per_block
    typical = min(TYPICAL_SEQ_LEN, limits.max_seq_len)
    requests = blocks // -(-typical // per_block)
    means = (
        f"{blocks * per_block:,} tokens of KV cache (set by {bound}): "
        f"{requests} requests of {typical} tokens at once"
    )
    return Finding(what="memory", found=found, means=means)


def first_start_bytes(config: InflightConfig) -> int:
    """What the first start of this checkpoint writes into the cache.

    Raises ConfigError, CheckpointError where the checkpoint cannot be sized.
    """
    model = model_shape(config)
    converted = _CONVERTED_BYTES_PER_WEIGHT if locate(config.model_dir).job is Job.GGUF else 0
    return model.num_weights * converted + model.weight_bytes
