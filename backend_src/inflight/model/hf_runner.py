"""HfRunner: the ModelRunner that drives transformers' classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import KvPool, group_layers
from inflight.model.attention import AttentionBackend
from inflight.model.device.faults import contained
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.dtypes import DTYPES
from inflight.model.packed_model import PackedModel
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)


class HfRunner:
    """A PackedModel and the attention backend that holds its KV cache. Used from one thread."""

    def __init__(
        self,
        model: PackedModel,
        backend: AttentionBackend,
        runtime: DeviceRuntime,
        *,
        kv_memory_bytes: int | None = None,
    ) -> None:
        """``backend`` is new: ``allocate_kv_cache`` allocates it. ``runtime``: of the model's
        device, for what is to be done after a fault. ``kv_memory_bytes``: as in ModelSpec."""
        self._model = model
        self._runtime = runtime
        self.backend = backend
        """The live KV storage and the attention over it."""
        self._is_allocated = False
        self._spec = ModelSpec(
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_position_embeddings,
            num_layers=len(model.layers),
            kv_bytes_per_token=backend.kv_bytes_per_token(model.layers),
            supported_tokens_per_block=backend.supported_tokens_per_block,
            dtype=next(name for name, dtype in DTYPES.items() if dtype is model.dtype),
            device=str(model.device),
            kv_memory_bytes=kv_memory_bytes,
            layer_groups=group_layers(
                model.windows, [backend.kv_bytes_per_token([layer]) for layer in model.layers]
            ),
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def memory_usage(self) -> MemoryUsage:
        memory = self._runtime.memory
        return MemoryUsage() if memory is None else MemoryUsage(device=memory.in_use())

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        assert not self._is_allocated
        self._spec.check_tokens_per_block(tokens_per_block, "this attention_backend")
        self.backend.allocate(
            self._model.layers,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            further_pools=further_pools,
        )
        self._is_allocated = True

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        assert self._is_allocated
        launched()  # every layer goes through the interpreter
        with contained(self._runtime, f"the forward pass of {len(inputs.token_ids)} rows"):
            logits = self._model.forward(inputs, self.backend)
            return ForwardOutput(logits=logits.float().contiguous().cpu().numpy())

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        assert self._is_allocated
        with contained(self._runtime, f"copying {len(source_ids)} KV blocks"):
            self.backend.copy_blocks(source_ids, target_ids, pool)

    @property
    def kv_block_format(self) -> str:
        assert self._is_allocated
        return f"{self._spec.dtype} {self.backend.block_format}"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        assert self._is_allocated
        with contained(self._runtime, f"reading {len(block_ids)} KV blocks"):
            return self.backend.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        assert self._is_allocated
        with contained(self._runtime, f"writing {len(block_ids)} KV blocks"):
            self.backend.write_blocks(block_ids, contents)
