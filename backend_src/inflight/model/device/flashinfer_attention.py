"""FlashInferAttention: paged attention by the library FlashInfer, where it is installed.

FlashInfer plans an iteration on the host, for each set of score rules, and then runs any number of
layers by that plan. Names and layouts are those of its documentation (flashinfer.decode,
flashinfer.prefill): a page is a block, and its layout HND is that of ``kernels/kv_layout.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from inflight.errors import ConfigError, one_line
from inflight.kernels.launch import multiprocessors
from inflight.model.device.flashinfer_rows import (
    Int32Array,
    PagedSequences,
    Sequences,
    paged_sequences,
)
from inflight.model.device.runtime import DeviceRuntime

if TYPE_CHECKING:
    from inflight.kernels.tuning import AttentionShape

DEVICE_TYPES = ("cuda",)
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
SUPPORTED_HEAD_DIMS = (64, 128, 256)
KV_LAYOUT = "HND"
LEAST_WORKSPACE = 128 << 20
"""Bytes; what FlashInfer's documentation recommends."""
MOST_TILE_ROWS = 128
"""Of FlashInfer's tiles, a row being a query head of a token."""
LARGEST_GROUP_WITHOUT_TENSOR_CORES = 2
"""Query heads of a KV head. With more of them FlashInfer's documentation calls its tensor-core
kernels of generations the faster ones; nor do the others take every number."""


class ScoreRules(Protocol):
    """``kernels.attention.ScoreRules``, without what FlashInfer cannot do."""

    @property
    def scale(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """Rules that layers share: one plan serves all of them."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: None = None

    @classmethod
    def of(cls, rules: ScoreRules) -> ScoreKind:
        return cls(rules.scale, rules.sliding_window, rules.softcap)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``plan``. FlashInfer counts how many tokens before its own a row sees, and -1 are all;
        our window counts the row's own token too."""
        window = self.sliding_window
        return {
            "sm_scale": self.scale,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.softcap,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Which rows FlashInfer attends for."""

    contexts: bool
    generations: bool


BOTH_PHASES = Phases(contexts=True, generations=True)


def missing_reason() -> str | None:
    """None: FlashInfer is installed. Does not import it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return None
    return "the package flashinfer is not installed"


def unsupported_reason(shape: AttentionShape, device: torch.device) -> str | None:
    """Why FlashInfer cannot serve such heads on this device; None: it is worth a try. Sinks it
    never takes: a layer that has them stays with our kernels."""
    if device.type not in DEVICE_TYPES:
        return "FlashInfer needs a CUDA device"
    if shape.head_dim not in SUPPORTED_HEAD_DIMS:
        return f"FlashInfer takes heads of 64, 128 and 256, not of {shape.head_dim}"
    if shape.dtype not in SUPPORTED_DTYPES:
        return f"FlashInfer computes in fp16 and bf16, not in {shape.dtype}"
    return missing_reason()


def import_flashinfer() -> Any:
    """The module. Raises ConfigError where it is broken: it may be built for another torch."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:
        raise ConfigError(f"attention_backend: flashinfer: {one_line(error)}") from error


def workspace_bytes(shape: AttentionShape, device: torch.device) -> int:
    """What FlashInfer may want for partial results of contexts, where it splits keys.

    Its scheduler splits into two tiles for each multiprocessor at most, shared by the KV heads, and
    keeps fp32 sums and one statistic of each row for all query heads (PrefillPlan in its
    scheduler.cuh); it fails where there is less.
    """
    tiles = 2 * multiprocessors(device) // shape.num_kv_heads
    row_bytes = (shape.head_dim + 1) * torch.float32.itemsize
    wanted = shape.num_heads * tiles * MOST_TILE_ROWS * row_bytes
    return max(LEAST_WORKSPACE, wanted + (1 << 20))  # and alignment


class FlashInferAttention:
    """Attention of one decoder's layers. Used inside of ``computing``, an iteration at a time."""

    def __init__(
        self, shape: AttentionShape, kinds: Iterable[ScoreKind], runtime: DeviceRuntime
    ) -> None:
        """``unsupported_reason`` is None. Each of ``kinds`` takes some MiB for its plans. Raises
        ConfigError as ``import_flashinfer``, RuntimeError (torch.OutOfMemoryError on a GPU) when
        there is no room."""
        library = import_flashinfer()
        self._shape = shape
        self._runtime = runtime
        # All runs follow each other on one stream, so that they can share it.
        size = workspace_bytes(shape, runtime.device)
        workspace = torch.empty(size, dtype=torch.uint8, device=runtime.device)
        group = shape.num_heads // shape.num_kv_heads
        self._contexts: dict[ScoreKind, Any] = {}
        self._generations: dict[ScoreKind, Any] = {}
        for kind in kinds:
            self._contexts[kind] = library.BatchPrefillWithPagedKVCacheWrapper(workspace, KV_LAYOUT)
            self._generations[kind] = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                KV_LAYOUT,
                use_tensor_cores=group > LARGEST_GROUP_WITHOUT_TENSOR_CORES,
            )
        self._planned = runtime.mark()
        """Once it is reached, FlashInfer's own pinned buffers may be filled again."""

    def plan(self, sequences: Sequences, phases: Phases = BOTH_PHASES) -> None:
        """For the runs of an iteration; the host's numbers are all that is looked at."""
        self._planned.wait()
        count = sequences.num_context_sequences
        lengths, tables = sequences.context_lens, sequences.block_tables
        if phases.contexts and count:
            paged = self._paged(lengths[:count], tables[:count])
            starts = self._pinned(sequences.cu_seqlens_q[: count + 1])
            for kind, wrapper in self._contexts.items():
                wrapper.plan(starts, *paged, *self._sizes, causal=True, **self._options(kind))
        if phases.generations and count < len(lengths):
            paged = self._paged(lengths[count:], tables[count:])
            for kind, wrapper in self._generations.items():
                wrapper.plan(*paged, *self._sizes, **self._options(kind))
        self._planned = self._runtime.mark()

    def attend_contexts(self, query: Tensor, cache: Tensor, rules: ScoreRules, out: Tensor) -> None:
        """As ``kernels.attention.attend``, of the rows of contexts as they were planned."""
        self._contexts[ScoreKind.of(rules)].run(query, (cache[0], cache[1]), out=out)

    def attend_generations(
        self, query: Tensor, cache: Tensor, rules: ScoreRules, out: Tensor
    ) -> None:
        """Of the rows of generations as they were planned."""
        self._generations[ScoreKind.of(rules)].run(query, (cache[0], cache[1]), out=out)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self._shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.tokens_per_block

    def _options(self, kind: ScoreKind) -> dict[str, Any]:
        dtype = self._shape.dtype
        return {**kind.arguments, "q_data_type": dtype, "kv_data_type": dtype}

    def _paged(self, lengths: Int32Array, tables: Int32Array) -> tuple[Tensor, Tensor, Tensor]:
        """indptr, indices, last_page_len: those on the host that FlashInfer reads there, so that it
        does not wait for the device."""
        paged: PagedSequences = paged_sequences(lengths, tables, self._shape.tokens_per_block)
        indices = self._pinned(paged.indices).to(self._runtime.device, non_blocking=True)
        return self._pinned(paged.indptr), indices, self._pinned(paged.last_page_len)

    def _pinned(self, numbers: Int32Array) -> Tensor:
        """A copy. torch gives its memory to nobody else before it was copied to the device."""
        tensor = self._runtime.pinned(len(numbers), torch.int32)
        tensor.numpy()[:] = numbers
        return tensor
