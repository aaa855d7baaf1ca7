"""FusedOps: the operations that a decoder is made of, native or in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.model.fused.reference_ops import ReferenceAttention
from inflight.model.fused.spec import DecoderSpec
from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.elementwise import Elementwise, NativeElementwise, TorchElementwise
from inflight.native.experts import ExpertOps, NativeExperts, TorchExperts
from inflight.native.library import NativeLibrary
from inflight.native.linear import LinearOps, NativeLinear, TorchLinear
from inflight.native.recorded_calls import CallRecorder


class FusedAttention(Protocol):
    """``NativeAttention``'s methods; its docstrings are the contract."""

    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def block_format(self) -> str: ...
    def allocate(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None: ...
    def plan(self, rows: PackedInputs) -> None: ...
    def attend(self, layer: int, rules: LayerRules, qkv: Tensor, out: Tensor) -> None: ...
    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None: ...
    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]: ...
    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOps:
    elementwise: Elementwise
    linear: LinearOps
    experts: ExpertOps
    attention: FusedAttention
    """New: nothing is allocated yet."""
    supported_tokens_per_block: tuple[int, ...]
    """As in ModelSpec."""


def native_ops(library: NativeLibrary, spec: DecoderSpec, kv_dtype: torch.dtype) -> FusedOps:
    """``kv_dtype``: of the KV storage: float32, bfloat16 or int8."""
    attention = NativeAttention(
        library,
        num_layers=len(spec.layers),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
    )
    return FusedOps(
        elementwise=NativeElementwise(library),
        linear=NativeLinear(library),
        experts=NativeExperts(library),
        attention=attention,
        supported_tokens_per_block=SUPPORTED_TOKENS_PER_BLOCK,
    )


def recording_ops(ops: FusedOps, recorder: CallRecorder) -> FusedOps:
    """Of ``native_ops``: what is asked of these is written down instead of computed."""
    assert isinstance(ops.attention, NativeAttention)
    return replace(
        ops,
        elementwise=NativeElementwise(recorder),
        linear=NativeLinear(recorder),
        attention=ops.attention.recording(recorder),
    )


def reference_ops(spec: DecoderSpec, kv_dtype: torch.dtype) -> FusedOps:
    """The same in torch: for machines without a compiler, and what tests compare with."""
    attention = ReferenceAttention(
        num_layers=len(spec.layers),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
    )
    linear = TorchLinear()
    return FusedOps(
        elementwise=TorchElementwise(),
        linear=linear,
        experts=TorchExperts(linear),
        attention=attention,
        supported_tokens_per_block=(),
    )
