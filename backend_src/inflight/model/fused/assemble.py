"""From a description and packed weights to a decoder and its runner, on native kernels or in torch.

Nothing of transformers is imported here: a built engine is loaded without it.
"""

from __future__ import annotations

import torch

from inflight.api.config import InflightConfig
from inflight.errors import ConfigError
from inflight.model.dtypes import choose_kv_dtype
from inflight.model.fused.forward import FusedDecoder
from inflight.model.fused.ops import native_ops, reference_ops
from inflight.model.fused.runner import FusedRunner
from inflight.model.fused.spec import DecoderSpec
from inflight.model.fused.weights import DecoderWeights
from inflight.native.kv_storage import KV_KINDS
from inflight.native.library import NativeLibrary


def make_decoder(
    spec: DecoderSpec,
    weights: DecoderWeights,
    library: NativeLibrary | None,
    *,
    max_num_tokens: int,
    max_seq_len: int,
    kv_cache_dtype: str = "auto",
    records_calls: bool = False,
) -> FusedDecoder:
    """``library`` None: in torch. Native kernels use as many threads as torch does.
    ``kv_cache_dtype``: the key. ``records_calls``: iterations take less time, and ``ops`` may
    not be replaced after the first. Raises ConfigError for a KV dtype that no CPU stores."""
    kv_dtype = choose_kv_dtype(kv_cache_dtype, weights.embedding.dtype)
    if kv_dtype not in KV_KINDS:
        raise ConfigError(f"kv_cache_dtype: {kv_cache_dtype}: stored on a GPU only")
    if library is None:
        ops = reference_ops(spec, kv_dtype)
    else:
        library.set_num_threads(torch.get_num_threads())
        ops = native_ops(library, spec, kv_dtype)
    return FusedDecoder(
        spec,
        weights,
        ops,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        library=library if records_calls else None,
    )


def make_runner(
    spec: DecoderSpec,
    weights: DecoderWeights,
    library: NativeLibrary | None,
    config: InflightConfig,
) -> FusedRunner:
    """The runner without its KV cache, for the limits of ``config``."""
    decoder = make_decoder(
        spec,
        weights,
        library,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len or spec.max_position_embeddings,
        kv_cache_dtype=config.kv_cache_dtype,
        records_calls=True,
    )
    return FusedRunner(decoder)
