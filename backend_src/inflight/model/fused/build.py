"""build_engine: a checkpoint as a built engine, compared with transformers before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.api.config import InflightConfig
from inflight.engine_files.file import write_engine
from inflight.engine_files.key import EngineKey, engine_key
from inflight.engine_files.limits import write_limits
from inflight.engine_files.store import EngineStore
from inflight.errors import CheckpointError
from inflight.model.fused.built import (
    BuiltDecoder,
    Proof,
    course_logits,
    limits_of,
    prove,
    read_built,
    torch_logits,
)
from inflight.model.fused.load import read_spec, weight_kinds
from inflight.model.fused.tensors import CheckpointTensors
from inflight.model.fused.weights import load_weights
from inflight.model.loading import load_model
from inflight.model.probe import check_typical
from inflight.model.probe_course import THOROUGH
from inflight.native.library import NativeLibrary

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""(what is being done, share of the whole build in [0, 1])."""

_PACKING_STARTS, _WRITING_STARTS, _PROOF_STARTS = 0.3, 0.85, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    directory: Path
    config: InflightConfig
    key: EngineKey
    library: NativeLibrary | None
    """None: torch computes."""
    progress: Progress


def build_engine(
    checkpoint_directory: Path,
    config: InflightConfig,
    library: NativeLibrary,
    progress: Progress,
) -> BuiltDecoder:
    """The engine, built unless it is there, and proved by this process: what it has built and read
    back a moment ago is not read and proved again. Waits while another process builds it.
    ``config.dtype`` is never auto.

    Raises CheckpointError: the checkpoint is not served, cannot be fused, or computes something
    else than transformers' classes do; ConfigError for a dtype that is not computed here. Where the
    cache cannot be written the engine lives in memory alone, with a warning.
    """
    progress("reading the checkpoint", 0.0)
    key = engine_key(checkpoint_directory, config.dtype, config.cache_dir)
    job = _Job(
        directory=checkpoint_directory, config=config, key=key, library=library, progress=progress
    )
    store = EngineStore(config.cache_dir)
    proved: list[BuiltDecoder] = []
    try:
        store.build(
            key,
            lambda folder: proved.append(_build_into(folder, job)),
            on_wait=lambda: progress("waiting for another process that builds it", 0.0),
        )
    except OSError as error:
        place = error.filename or config.cache_dir
        _LOG.warning("cache_dir: %s: %s: the engine is not kept", place, error.strerror)
        return _in_memory(job)
    built = store.load(key, lambda folder: proved[0] if proved else read_built(folder))
    if built is None:
        raise CheckpointError(f"cache_dir: {store.folder(key)} is damaged as soon as it is written")
    if not proved:
        prove(built, key.dtype, library, config.tokens_per_block)
    return built


def build_in_memory(
    checkpoint_directory: Path, config: InflightConfig, progress: Progress
) -> BuiltDecoder:
    """The engine where there are no native kernels: as well proved, in torch, and not kept, since
    what takes the time then is not to pack weights. Raises as ``build_engine`` does."""
    key = engine_key(checkpoint_directory, config.dtype, config.cache_dir)
    job = _Job(
        directory=checkpoint_directory, config=config, key=key, library=None, progress=progress
    )
    return _in_memory(job)


def _in_memory(job: _Job) -> BuiltDecoder:
    engine = _pack(job)
    job.progress("comparing with transformers", _PROOF_STARTS)
    if job.library is None:  # torch's rows are those of the proof already
        proof = engine.proof
        check_typical(proof.packed, proof.logits, engine.architecture, job.key.dtype)
    else:
        prove(engine, job.key.dtype, job.library, job.config.tokens_per_block)
    return engine


def _build_into(folder: Path, job: _Job) -> BuiltDecoder:
    """The engine as it was read back, proved."""
    engine = _pack(job)
    job.progress("writing the engine", _WRITING_STARTS)
    looked_up = [engine.weights.embedding, engine.proof.logits, engine.proof.packed]
    write_engine(folder, job.key, engine, looked_up=looked_up)
    del engine  # what is proved is what was written
    job.progress("comparing with transformers", _PROOF_STARTS)
    written = read_built(folder)
    deviation = prove(written, job.key.dtype, job.library, job.config.tokens_per_block)
    _LOG.info("logits differ from transformers' by %.2g of their spread", deviation)
    write_limits(folder, limits_of(job.key, job.config, written.spec))
    job.progress("built", 1.0)
    return written


def _pack(job: _Job) -> BuiltDecoder:
    kind, activations = weight_kinds(job.key.dtype)
    spec = read_spec(job.directory)
    num_layers = len(spec.layers)
    job.progress("computing reference logits with transformers", 0.0)
    architecture, proof = _reference(job.directory, activations, num_layers)

    def on_layer(layer: int) -> None:
        share = (layer + 1) / num_layers
        where = _PACKING_STARTS + share * (_WRITING_STARTS - _PACKING_STARTS)
        job.progress(f"packing weights for {job.key.dtype}", where)

    tensors = CheckpointTensors(job.directory)
    weights = load_weights(tensors, spec, kind, activations, on_layer=on_layer)
    engine = BuiltDecoder(architecture=architecture, spec=spec, weights=weights, proof=proof)
    tokens_per_block = job.config.tokens_per_block
    if job.library is None:  # torch serves, so the course is torch's to prove
        packed = course_logits(engine, None, tokens_per_block)
    else:
        packed = torch_logits(engine, tokens_per_block)
    return replace(engine, proof=replace(proof, packed=packed))


def _reference(directory: Path, dtype: torch.dtype, num_layers: int) -> tuple[str, Proof]:
    """The architecture, and what its own classes compute. They are gone before weights are packed:
    both at once would take twice the memory."""
    model = load_model(directory, dtype=dtype, device=torch.device("cpu"))
    if model.config.num_hidden_layers != num_layers:
        raise CheckpointError(
            f"model_dir: {directory}: {num_layers} layers are described, and the model has "
            f"{model.config.num_hidden_layers}"
        )
    model.set_attn_implementation("eager")
    token_ids = THOROUGH.token_ids(model.config.vocab_size)

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    with torch.inference_mode():
        logits = THOROUGH.plain_logits(forward, token_ids)
    return _architecture(model), Proof(token_ids=token_ids, logits=logits, packed=logits)


def _architecture(model: Any) -> str:
    return str(model.config.model_type)
