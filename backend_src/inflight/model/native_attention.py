"""NativeAttentionBackend: the attention plugin over the native kernels, for any CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules, NativeAttention, unsupported_reason
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.library import NativeLibrary


def unsupported_layers(
    layers: Sequence[KvLayer], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why this backend cannot serve a model with these layers and activations of ``dtype``; None:
    it can."""
    if device.type != "cpu":
        return f"native attention runs on the CPU, not on {device.type}"
    if len(set(layers)) != 1:
        return "native attention needs the same KV heads in every layer"
    layer = layers[0]
    return unsupported_reason(head_dim=layer.key_dim, value_dim=layer.value_dim, dtype=dtype)


class NativeAttentionBackend:
    """Attention of heads to which the model has already applied rope.

    For layers that ``unsupported_layers`` has nothing against; see ``NativeAttention`` for what it
    computes in.
    """

    supported_tokens_per_block: tuple[int, ...] = SUPPORTED_TOKENS_PER_BLOCK

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        """``dtype``: of the storage: fp32, bf16 or int8."""
        self._library = library
        self._dtype = dtype
        self._attention: NativeAttention | None = None
        self._rules: dict[int, tuple[AttentionRules, LayerRules]] = {}

    @property
    def storage(self) -> Tensor:
        """The live tensor of the first pool; its layout is the native attention's own."""
        return self._native.storage

    def kv_bytes_per_token(self, layers: Sequence[KvLayer]) -> int:
        return sum(layer.bytes_per_token(self._dtype) for layer in layers)

    def allocate(
        self,
        layers: Sequence[KvLayer],
        *,
        num_blocks: int,
        tokens_per_block: int,
        further_pools: Sequence[KvPool] = (),
    ) -> None:
        assert self._attention is None
        self._attention = NativeAttention(
            self._library,
            num_layers=len(layers),
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].key_dim,
            dtype=self._dtype,
        )
        self._attention.allocate(num_blocks, tokens_per_block, further_pools)

    def begin_iteration(self, inputs: PackedInputs) -> None:
        self._native.plan(inputs)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        out = query.new_empty(query.shape)
        native_rules = self._native_rules(layer, query, rules)
        heads = (_dense(query), _dense(key.to(query.dtype)), _dense(value.to(query.dtype)))
        self._native.attend_heads(layer, native_rules, *heads, out)
        return out

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        self._native.copy_blocks(source_ids, target_ids, pool)

    @property
    def block_format(self) -> str:
        return self._native.block_format

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        return self._native.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self._native.write_blocks(block_ids, contents)

    @property
    def _native(self) -> NativeAttention:
        assert self._attention is not None, "allocate comes first"
        return self._attention

    def _native_rules(self, layer: int, query: Tensor, rules: AttentionRules) -> LayerRules:
        """Those of the iteration before, as long as the layer asks for the same."""
        known = self._rules.get(layer)
        if known is not None and _same(known[0], rules):
            return known[1]
        sinks = None if rules.sinks is None else rules.sinks.detach().float().contiguous()
        native_rules = LayerRules(
            num_heads=query.shape[1],
            head_dim=query.shape[2],
            scale=rules.scale,
            softcap=rules.softcap,
            sliding_window=rules.sliding_window,
            sinks=sinks,
        )
        self._rules[layer] = (rules, native_rules)
        return native_rules


def _same(a: AttentionRules, b: AttentionRules) -> bool:
    return (
        a.scale == b.scale
        and a.sliding_window == b.sliding_window
        and a.softcap == b.softcap
        and a.sinks is b.sinks
    )


def _dense(heads: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return heads if heads.stride(2) == 1 else heads.contiguous()
