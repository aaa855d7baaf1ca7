"""The engine: its libraries, the checkpoint, who runs it, and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inflight.api.config import InflightConfig
from inflight.checkpoint.locate import Job, locate
from inflight.cli.doctor.accelerator import installed_version
from inflight.cli.doctor.finding import Finding, Status, size_text
from inflight.cli.memory import available_memory
from inflight.cli.sizing import executor_limits, model_shape
from inflight.engine.memory import (
    DEFAULT_CPU_FRACTION,
    DEFAULT_GPU_FRACTION,
    TYPICAL_SEQ_LEN,
    KvMemory,
    num_fitting,
)
from inflight.engine.pools import kv_pools, layer_groups
from inflight.errors import ConfigError, InflightError
from inflight.model.choice import dtype_on_cpu
from inflight.simulator.model_shape import ModelShape

_FAST = "the fast one, for the architectures it knows"
_NATIVE = "fused on native kernels"
_HF_ASKED_FOR = "hf", "transformers' classes, the slower runner, as the configuration says", False
_AUTO_RUNNER = "INFLIGHT_RUNNER=auto"
_WITH_FLASHINFER = "with FlashInfer's attention"
_OF_THE_CPU = ("int8", "int4")
_OF_A_GPU = ("fp8",)
"""Dtypes that only native kernels compute in, and only a card."""
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
    """The engine would compute on a card."""
    has_compiler: bool
    has_triton: bool
    """Triton's language, and what it compiles with."""
    has_flashinfer: bool
    """FlashInfer is installed."""


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
    if place.has_gpu and place.has_triton:
        there.insert(0, "fused on Triton-language kernels")
        if place.has_flashinfer:
            there.insert(1, _WITH_FLASHINFER)
    elif place.has_compiler and not place.has_gpu:
        there = [_NATIVE, "hf on native attention", *there]
    found = f"here: {', '.join(there)}"
    means = _attention_refused(config, place)
    if means is not None:
        return _refused(found, means, "INFLIGHT_ATTENTION_BACKEND=auto")
    is_bare = place.has_gpu and not place.has_triton and config.attention_backend != "torch"
    if is_bare and config.runner == "fused":
        return _refused(found, "on a GPU runner fused needs Triton's kernels", _AUTO_RUNNER)
    taken, means, is_slow = (
        _taken_on_card(config, place) if place.has_gpu else _taken(config, place)
    )
    if config.dtype in (_OF_THE_CPU if place.has_gpu else _OF_A_GPU):
        means = f"dtype {config.dtype} is not computed on a {'GPU' if place.has_gpu else 'CPU'}"
        return _refused(found, means, "--dtype auto")
    if config.dtype in _OF_THE_CPU + _OF_A_GPU and taken.startswith("hf"):
        means = f"only the fused runner computes in {config.dtype}, and {taken} is taken: {means}"
        return _refused(found, means, "--dtype auto")
    if config.dtype == "auto" and not place.has_gpu:
        means = f"{means}; dtype auto is {dtype_on_cpu('auto', is_native=taken == _NATIVE)}"
    return Finding(
        what="runner",
        found=f"{found}; runner {config.runner} takes {taken}",
        means=means,
        status=Status.NOTE if is_slow else Status.GOOD,
    )


def _attention_refused(config: InflightConfig, place: Place) -> str | None:
    """What ``attention_backend`` lacks here, where it names one; None: nothing."""
    wanted = config.attention_backend
    if wanted == "flashinfer" and not (place.has_gpu and place.has_triton and place.has_flashinfer):
        return "attention_backend flashinfer needs a GPU, Triton's kernels and that library"
    if wanted == "triton" and not (place.has_gpu and place.has_triton):
        return "attention_backend triton needs a GPU, Triton's language and a C compiler"
    if wanted == "cpu" and place.has_gpu:
        return "attention_backend cpu computes on a CPU, and the GPU is taken"
    if wanted == "cpu" and not place.has_compiler:
        return "attention_backend cpu needs native kernels, and there is no compiler for them"
    if wanted == "torch" and config.runner == "fused" and place.has_compiler and not place.has_gpu:
        return "runner fused has no attention_backend torch on a CPU: its own kernels attend"
    return None


def _refused(found: str, means: str, remedy: str) -> Finding:
    return Finding(what="runner", found=found, means=means, status=Status.BAD, remedy=remedy)


def _taken(config: InflightConfig, place: Place) -> tuple[str, str, bool]:
    """On a CPU: what runs the model, what that means, whether something faster would."""
    if config.runner == "hf":
        return _HF_ASKED_FOR
    only_fused = config.runner == "fused" or config.dtype in _OF_THE_CPU
    if only_fused and not place.has_compiler:
        return "fused on torch", "without native kernels: slow", True
    if not place.has_compiler:
        return "hf on torch attention", "without native kernels, slower", True
    if config.attention_backend == "torch":
        return "hf on torch attention", "because of attention_backend, slower", True
    if "fp16" in (config.dtype, config.kv_cache_dtype):
        return "hf on torch attention", "native kernels do not compute in fp16, slower", True
    return _NATIVE, _FAST, False


def _taken_on_card(config: InflightConfig, place: Place) -> tuple[str, str, bool]:
    """As ``_taken``, on a card."""
    if config.runner == "hf":
        return _HF_ASKED_FOR
    if config.attention_backend == "torch":
        return "fused on torch", "without kernels, because of attention_backend: slow", True
    if not place.has_triton:
        return "hf on torch attention", "without kernels for the card, slower", True
    return "fused on Triton-language kernels", _FAST, False


def look_at_memory(config: InflightConfig, card_free_bytes: int | None) -> Finding:
    """Weights, KV cache, and the requests that fit. ``card_free_bytes``: None without a card."""
    on_host = card_free_bytes is None
    free = available_memory() if card_free_bytes is None else card_free_bytes
    where = "memory" if on_host else "memory of the card"
    model = _shape(config)
    if model is None:
        found = f"{size_text(free)} of {where} available"
        means = "what this checkpoint needs cannot be told before it is converted"
        return Finding(what="memory", found=found, means=means, status=Status.NOTE)
    weights = size_text(model.weight_bytes)
    found = f"{size_text(free)} of {where} available, weights take {weights}"
    limits = executor_limits(config, model)
    try:
        fraction = DEFAULT_CPU_FRACTION if on_host else DEFAULT_GPU_FRACTION
        memory = KvMemory(free - model.weight_bytes, fraction)
        # On a card all layers share a pool.
        placed = model if on_host else replace(model, layer_groups=())
        pools, bound = kv_pools(limits, layer_groups(placed, limits), memory)
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
    requests = num_fitting(pools, typical, per_block)
    means = (
        f"{pools[0].num_blocks * per_block:,} tokens of KV cache (set by {bound}): "
        f"{requests} requests of {typical} tokens at once"
    )
    return Finding(what="memory", found=found, means=means)


def first_start_bytes(config: InflightConfig) -> int | None:
    """What the first start of this checkpoint writes into the cache; None where it cannot be told
    yet, or ever."""
    model = _shape(config)
    if model is None:
        return None
    is_gguf = not config.model_dir  # others are not sized before they are converted
    converted = _CONVERTED_BYTES_PER_WEIGHT if is_gguf else 0
    return model.num_weights * converted + model.weight_bytes


def _shape(config: InflightConfig) -> ModelShape | None:
    """None for a GGUF file that is not the embedded one, and for what is no checkpoint at all,
    which ``look_at_checkpoint`` says."""
    try:
        return model_shape(config)
    except InflightError:
        return None
