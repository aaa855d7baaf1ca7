"""The seam to the device: ModelRunner, its packed inputs and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import KvGroup, KvPool
from inflight.batch.device_sampling import SampledRows, SamplingInputs, SamplingRoom
from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the engine must know of a loaded model."""

    vocab_size: int
    """Columns of the logits."""
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    num_layers: int
    kv_bytes_per_token: int
    """Bytes of K and V of one token over all layers, as the attention backend stores them."""
    supported_tokens_per_block: tuple[int, ...]
    """Block sizes the attention backend takes; () = any."""
    dtype: str
    """"fp32", "bf16" or "fp16"."""
    device: str
    layer_groups: tuple[KvGroup, ...] = ()
    """The layers by sliding window, those without one first, then the shortest window first; ():
    no layer has a window. Their bytes add up to ``kv_bytes_per_token``."""
    kv_memory_bytes: int | None = None
    """What the device has free for the KV cache, after the weights and the largest forward; None:
    the KV cache lies in the host's memory."""
    sampling_room: SamplingRoom | None = None
    """Of a runner that samples where it computes; None: it gives logits."""

    def check_tokens_per_block(self, tokens_per_block: int, taken_by: str) -> None:
        """Raises ConfigError for a block size that is not supported; ``taken_by`` names what would
        have to support it."""
        supported = self.supported_tokens_per_block
        if supported and tokens_per_block not in supported:
            raise ConfigError(
                f"tokens_per_block: {tokens_per_block} must be one of "
                f"{', '.join(map(str, supported))} for {taken_by}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """Where the KV of an iteration's rows lies in one pool. The fields of PackedInputs have the
    first pool's."""

    slot_mapping: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """One iteration's rows without padding: T tokens of S sequences, R of which sample.

    The arrays are views into buffers that the next iteration overwrites.
    """

    token_ids: npt.NDArray[np.int64]
    """int64[T]."""
    position_ids: npt.NDArray[np.int64]
    """int64[T], position of each token in its own sequence."""
    slot_mapping: npt.NDArray[np.int64]
    """int64[T], block_id * tokens_per_block + offset: where each token's K and V go."""
    cu_seqlens_q: npt.NDArray[np.int32]
    """int32[S + 1], rows of sequence s are [cu_seqlens_q[s], cu_seqlens_q[s + 1])."""
    context_lens: npt.NDArray[np.int32]
    """int32[S], tokens of each sequence that are in the KV cache after this iteration."""
    block_tables: npt.NDArray[np.int32]
    """int32[S, B]; entries past ceil(context_len / tokens_per_block) are undefined. Those before
    the sliding window of a sequence's first row are ids of the pool, of anybody's blocks."""
    logits_indices: npt.NDArray[np.int64]
    """int64[R], ascending rows in [0, T) whose logits are wanted."""
    num_context_sequences: int
    """The first this many of the S sequences are contexts, the others generations (1 row)."""
    num_context_tokens: int
    need_logits: bool = True
    """False: of each of the R rows only the id of its largest logit is wanted."""
    sampling: SamplingInputs | None = None
    """How the R rows are sampled, for a runner that has room for it; None: it gives logits, or ids
    where no logits are needed."""
    further_pools: tuple[PoolRows, ...] = ()
    """Of the second pool and those after it, where layers are spread over several."""

    def of_pool(self, pool: int) -> PackedInputs:
        """The same rows with the slots and tables of pool ``pool``, counted from 0."""
        if pool == 0:
            return self
        rows = self.further_pools[pool - 1]
        return replace(
            self,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            further_pools=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Of the R rows asked for, in their order."""

    logits: npt.NDArray[np.float32] | None
    """float32[R, vocab_size], raw; the sampler may write into it. None only where ``likeliest`` is
    there instead; with ``sampled`` those of the rows that are left, as float32[L, vocab_size]."""
    likeliest: npt.NDArray[np.int32] | None = None
    """int32[R], an answer to inputs that need no logits: the id of each row's largest logit, the
    lowest of equal ones. Each of these logits is a finite number."""
    sampled: SampledRows | None = None
    """An answer to inputs that say how their rows are sampled."""


class MemoryUsage(NamedTuple):
    """Bytes that a runner has allocated beside the pageable memory of its process."""

    device: int = 0
    """Of the device's own memory: weights, KV cache, graphs and buffers."""
    pinned: int = 0
    """Of the host's memory, where the device copies offloaded KV blocks from and to."""


def nothing_beside() -> None:
    """The ``launched`` of a forward that nobody does anything beside."""


class ModelRunner(Protocol):
    """Runs one packed forward. It owns the weights and the KV storage; it knows no requests."""

    @property
    def spec(self) -> ModelSpec: ...

    def memory_usage(self) -> MemoryUsage:
        """As it is now; waits for nothing."""
        ...

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        """Makes the KV storage (once). Raises ConfigError for a block size it does not take.

        ``num_blocks``: of the first pool, which has all layers that are in none of
        ``further_pools``.
        """
        ...

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        """Computes the rows, writing their K and V into the slots. Raises ForwardError, or
        EngineError where no later forward can succeed.

        ``launched`` is called, on this thread, when most of what is left to do needs no
        interpreter: others who use it from then on do not delay the forward. It may be called more
        than once, or never.
        """
        ...

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        """Copies whole KV blocks (copy-on-write) of a pool, all its layers. This and the next two
        raise as ``forward`` does."""
        ...

    @property
    def kv_block_format(self) -> str:
        """What the bytes of ``read_blocks`` mean. Blocks of the same model, block size and format
        are interchangeable, also between processes. After ``allocate_kv_cache``."""
        ...

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        """The KV of blocks (int32[n]), all layers: of each uint8[tokens_per_block *
        kv_bytes_per_token], a copy in memory of its own, so that each can be given up alone. Not
        during a forward; this and the next only where there is one pool."""
        ...

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """Fills blocks (int32[n], all different) with as many contents that ``read_blocks`` gave,
        which may be read-only. Not during a forward."""
        ...
