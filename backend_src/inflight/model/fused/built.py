"""BuiltDecoder: what a built engine holds, and loading it without transformers.

The engine carries its proof: logits that transformers' own classes computed when it was built. At
every load the kernels of this machine have to come to the same, called as they will be in service:
about a second of a small model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from inflight.api.config import InflightConfig
from inflight.engine_files.file import read_engine
from inflight.engine_files.key import EngineKey, engine_key
from inflight.engine_files.limits import BuiltLimits, read_limits, write_limits
from inflight.engine_files.store import EngineStore
from inflight.errors import CheckpointError
from inflight.model.dtypes import choose_kv_dtype
from inflight.model.fused.assemble import make_decoder
from inflight.model.fused.forward import FusedDecoder
from inflight.model.fused.ops import FusedAttention
from inflight.model.fused.spec import DecoderSpec
from inflight.model.fused.weights import DecoderWeights
from inflight.model.probe import TOLERANCE, check_rows, check_typical, flipping
from inflight.model.probe_course import THOROUGH
from inflight.model.runner import PackedInputs
from inflight.native.experts import TorchExperts
from inflight.native.library import NativeLibrary
from inflight.native.linear import TorchLinear

_LOG = logging.getLogger(__name__)

MOST_ROWS_TWICE = 64
"""Rows of an iteration of the course that is computed by recorded calls and again by calls from
Python: a context beside generations, and generations alone, a third of the course's time. What is
recorded is the same for any number of rows, but for that number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proof:
    """What transformers' plain forward makes of a few tokens, in the dtype of the activations, and
    what torch makes of them with the weights as they are packed."""

    token_ids: Tensor
    """int64[tokens of the course ``THOROUGH``]."""
    logits: Tensor
    """float32[R, vocab_size], of the rows that the course compares."""
    packed: Tensor
    """float32[R, vocab_size], what torch makes of the engine's weights: the same rows, quantized
    like them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltDecoder:
    architecture: str
    """``model_type`` of the checkpoint."""
    spec: DecoderSpec
    weights: DecoderWeights
    proof: Proof


def find_engine(checkpoint_directory: Path, config: InflightConfig) -> BuiltDecoder | None:
    """The engine of this checkpoint, dtype (never auto), CPU and code; None: it has to be built.
    Raises CheckpointError when the checkpoint cannot be read."""
    key = engine_key(checkpoint_directory, config.dtype, config.cache_dir)
    return EngineStore(config.cache_dir).load(key, read_built)


def read_built(folder: Path) -> BuiltDecoder:
    """Raises DamagedEngineError."""
    return read_engine(folder, BuiltDecoder)


def prove(
    engine: BuiltDecoder, dtype: str, library: NativeLibrary | None, tokens_per_block: int
) -> float:
    """How far the packed, chunked logits of this machine's kernels are from transformers' own,
    typically and relative to their spread. ``dtype``: of the key, never auto; ``library`` None: of
    torch; ``tokens_per_block``: one that these operations take, that of the service.

    Raises CheckpointError when that is more than rounding and quantizing explain, when one row is
    another than torch makes of the same weights, or when recorded calls or layers are not right
    (``course_logits``).
    """
    packed = course_logits(engine, library, tokens_per_block)
    return _check(engine, packed, dtype, dtype)


def prove_kv_storage(
    engine: BuiltDecoder, dtype: str, library: NativeLibrary | None, config: InflightConfig
) -> None:
    """As ``prove``, which keeps K and V in the dtype of the activations, with ``kv_cache_dtype``;
    nothing where that is the same. What rounding explains is that of the coarser of both dtypes."""
    activations = engine.weights.embedding.dtype
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, activations)
    if kv_dtype is activations:
        return
    packed = course_logits(engine, library, config.tokens_per_block, config.kv_cache_dtype)
    _check(engine, packed, dtype, config.kv_cache_dtype)


def _check(engine: BuiltDecoder, packed: Tensor, *dtypes: str) -> float:
    dtype = max(dtypes, key=TOLERANCE.__getitem__)
    # Rows that quantizing moved far hide a fault; torch has computed with the same weights.
    groups = flipping(THOROUGH, engine.spec)
    check_rows(packed, engine.proof.packed, engine.architecture, dtype, flipping=groups)
    return check_typical(packed, engine.proof.logits, engine.architecture, dtype)


def course_logits(
    engine: BuiltDecoder,
    library: NativeLibrary | None,
    tokens_per_block: int,
    kv_cache_dtype: str = "auto",
) -> Tensor:
    """float32[R, vocab_size] of the course, by the calls that serve; ``library`` None: of torch.

    Recorded calls are compared with calls from Python in iterations of few rows. Raises
    CheckpointError when they differ in any bit, or when a layer did not come to the attention once
    an iteration.
    """
    is_native_throughout = library is not None and not engine.spec.has_experts
    decoder = make_decoder(
        engine.spec,
        engine.weights,
        library,
        max_num_tokens=THOROUGH.max_num_tokens,
        max_seq_len=THOROUGH.max_seq_len,
        kv_cache_dtype=kv_cache_dtype,
        records_calls=is_native_throughout,
    )
    decoder.ops.attention.allocate(THOROUGH.num_blocks(tokens_per_block), tokens_per_block)
    by_calls = _CountedCalls(decoder, engine.architecture)

    def forward(inputs: PackedInputs) -> Tensor:
        if not is_native_throughout:
            return by_calls.forward(inputs)
        # First, so that it reads no K and V but its own.
        logits = decoder.forward(inputs)
        if len(inputs.token_ids) <= MOST_ROWS_TWICE:
            by_calls.check_same(inputs, logits)
        return logits

    return THOROUGH.packed_logits(forward, tokens_per_block, engine.proof.token_ids)


def torch_logits(engine: BuiltDecoder, tokens_per_block: int) -> Tensor:
    """float32[R, vocab_size] of the rows that the course compares, by torch with the packed
    weights; each sequence is one context. Unpacks a part of one linear at a time."""
    decoder = make_decoder(
        engine.spec,
        engine.weights,
        None,
        max_num_tokens=THOROUGH.num_tokens,
        max_seq_len=THOROUGH.max_seq_len,
    )
    linear = TorchLinear(keeps_unpacked=False)
    decoder.ops = replace(decoder.ops, linear=linear, experts=TorchExperts(linear))
    decoder.ops.attention.allocate(THOROUGH.num_blocks(tokens_per_block), tokens_per_block)
    return THOROUGH.whole_logits(decoder.forward, tokens_per_block, engine.proof.token_ids)


def note_limits(key: EngineKey, config: InflightConfig, spec: DecoderSpec) -> None:
    """Checks the limits that the engine was built for; those of ``config`` that go beyond them are
    said and recorded, since no weight depends on them."""
    folder = EngineStore(config.cache_dir).folder(key)
    wanted, built = limits_of(key, config, spec), read_limits(folder)
    beyond = [] if built is None else list(wanted.beyond(built))
    for text in beyond:
        _LOG.info("the engine's record is written anew: %s", text)
    if built is None or beyond:
        write_limits(folder, wanted if built is None else built.widened_to(wanted))


def limits_of(key: EngineKey, config: InflightConfig, spec: DecoderSpec) -> BuiltLimits:
    return BuiltLimits(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len or spec.max_position_embeddings,
        max_beam_width=config.max_beam_width,
        dtype=key.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
    )


class _CountedCalls:
    """The decoder with each call made from Python, over the same KV cache. Raises CheckpointError
    when a layer does not come to the attention once an iteration."""

    def __init__(self, decoder: FusedDecoder, architecture: str) -> None:
        self._architecture = architecture
        self._attention = _CountingAttention(decoder.ops.attention)
        attention = cast(FusedAttention, self._attention)
        self._decoder = decoder.unrecorded()
        self._decoder.ops = replace(decoder.ops, attention=attention)

    def forward(self, inputs: PackedInputs) -> Tensor:
        self._attention.layers.clear()
        logits = self._decoder.forward(inputs)
        num_layers = len(self._decoder.spec.layers)
        if self._attention.layers != list(range(num_layers)):
            raise self._not_served(
                f"not each of its {num_layers} layers came to the attention once"
            )
        return logits

    def check_same(self, inputs: PackedInputs, logits: Tensor) -> None:
        """``logits``: of recorded calls for the same rows."""
        if not torch.equal(self.forward(inputs), logits):
            raise self._not_served("recorded calls compute something else than calls from Python")

    def _not_served(self, why: str) -> CheckpointError:
        return CheckpointError(f"architecture {self._architecture} is not served: {why}")


class _CountingAttention:
    """Passes everything on and notes which layers came."""

    def __init__(self, attention: FusedAttention) -> None:
        self._attention = attention
        self.layers: list[int] = []

    def attend(self, layer: int, *arguments: Any) -> None:
        self.layers.append(layer)
        self._attention.attend(layer, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)
