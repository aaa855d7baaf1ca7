"""FusedRunner: the ModelRunner over a FusedDecoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import KvGroup, KvPool, group_layers
from inflight.errors import ForwardError
from inflight.model.dtypes import DTYPES
from inflight.model.fused.forward import FusedDecoder
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)


class FusedRunner:
    """On the CPU. Used from one thread."""

    def __init__(self, decoder: FusedDecoder) -> None:
        """``decoder`` is new: ``allocate_kv_cache`` allocates its storage."""
        self.decoder = decoder
        self._is_allocated = False
        self._spec = ModelSpec(
            vocab_size=decoder.spec.vocab_size,
            max_position_embeddings=decoder.spec.max_position_embeddings,
            num_layers=len(decoder.spec.layers),
            kv_bytes_per_token=decoder.ops.attention.kv_bytes_per_token,
            supported_tokens_per_block=decoder.ops.supported_tokens_per_block,
            dtype=next(name for name, dtype in DTYPES.items() if dtype is decoder.dtype),
            device="cpu",
            layer_groups=_layer_groups(decoder),
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        assert not self._is_allocated
        self._spec.check_tokens_per_block(tokens_per_block, "the fused runner")
        self.decoder.ops.attention.allocate(num_blocks, tokens_per_block, further_pools)
        self._is_allocated = True

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        assert self._is_allocated and len(inputs.token_ids) <= self.decoder.max_num_tokens
        try:
            hidden = self.decoder.hidden(inputs, launched)
            ids = None if inputs.need_logits else self.decoder.likeliest(hidden)
            if ids is not None:
                return ForwardOutput(logits=None, likeliest=ids.numpy())
            return ForwardOutput(logits=self.decoder.logits(hidden).numpy())
        except Exception as error:
            raise ForwardError(
                f"the forward pass of {len(inputs.token_ids)} rows failed: {type(error).__name__}"
            ) from error

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        assert self._is_allocated
        self.decoder.ops.attention.copy_blocks(source_ids, target_ids, pool)

    @property
    def kv_block_format(self) -> str:
        assert self._is_allocated
        return f"{self._spec.dtype} {self.decoder.ops.attention.block_format}"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        assert self._is_allocated
        return self.decoder.ops.attention.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        assert self._is_allocated
        self.decoder.ops.attention.write_blocks(block_ids, contents)


def _layer_groups(decoder: FusedDecoder) -> tuple[KvGroup, ...]:
    """All layers have the same KV heads."""
    layers = decoder.spec.layers
    per_layer = decoder.ops.attention.kv_bytes_per_token // len(layers)
    return group_layers([layer.sliding_window for layer in layers], [per_layer] * len(layers))
