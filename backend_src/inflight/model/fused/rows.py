"""Rows: the buffers between the operations of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.model.fused.spec import DecoderSpec
from inflight.native.experts import Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRows:
    """Activations of T rows on their way through experts; k and the rest are those of Routing."""

    logits: Tensor
    """float32[T, num_experts + num_shared], of the router."""
    routing: Routing
    hidden: Tensor
    """[T * k, hidden_size], what the experts read."""
    inner: Tensor
    """[T * k, intermediate_size]."""
    results: Tensor
    """float32[T * (k + num_shared), hidden_size]."""

    @classmethod
    def allocate(cls, num_rows: int, spec: DecoderSpec, dtype: torch.dtype) -> ExpertRows | None:
        """None: no layer has experts."""
        layer = next((layer for layer in spec.layers if layer.experts is not None), None)
        if layer is None or layer.experts is None:
            return None
        experts, num_shared = layer.experts, int(layer.mlp is not None)
        num_chosen = experts.num_experts_per_token
        num_expert_rows = num_rows * num_chosen
        return cls(
            logits=torch.empty(num_rows, experts.num_experts + num_shared),
            routing=Routing.allocate(
                num_rows,
                num_experts=experts.num_experts,
                num_chosen=num_chosen,
                num_shared=num_shared,
            ),
            hidden=torch.empty(num_expert_rows, spec.hidden_size, dtype=dtype),
            inner=torch.empty(num_expert_rows, experts.mlp.intermediate_size, dtype=dtype),
            results=torch.empty(num_expert_rows + num_shared * num_rows, spec.hidden_size),
        )

    def first(self, num_rows: int) -> ExpertRows:
        num_expert_rows = num_rows * self.routing.num_chosen
        return ExpertRows(
            logits=self.logits[:num_rows],
            routing=self.routing.first(num_rows),
            hidden=self.hidden[:num_expert_rows],
            inner=self.inner[:num_expert_rows],
            results=self.results[: num_expert_rows + self.routing.num_shared * num_rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Activations of T rows. Those without a dtype here have the engine's."""

    residual: Tensor
    """float32[T, hidden_size], the residual stream divided by residual_multiplier: what is added to
    it needs no factor then, and a norm with an epsilon of its own takes it out again."""
    branch: Tensor
    """float32[T, hidden_size], what a block adds to the residual, where a norm comes between."""
    hidden: Tensor
    """[T, hidden_size], what a block reads."""
    qkv: Tensor
    """float32[T, qkv_size]."""
    attended: Tensor
    """[T, query_size]."""
    inner: Mapping[int, Tensor]
    """[T, intermediate_size] by intermediate_size of the layers' MLPs."""
    experts: ExpertRows | None

    @classmethod
    def allocate(cls, num_rows: int, spec: DecoderSpec, dtype: torch.dtype) -> Rows:
        sizes = {layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None}
        return cls(
            residual=torch.empty(num_rows, spec.hidden_size),
            branch=torch.empty(num_rows, spec.hidden_size),
            hidden=torch.empty(num_rows, spec.hidden_size, dtype=dtype),
            qkv=torch.empty(num_rows, spec.qkv_size),
            attended=torch.empty(num_rows, spec.query_size, dtype=dtype),
            inner={size: torch.empty(num_rows, size, dtype=dtype) for size in sizes},
            experts=ExpertRows.allocate(num_rows, spec, dtype),
        )

    def __len__(self) -> int:
        return len(self.residual)

    def first(self, num_rows: int) -> Rows:
        return Rows(
            residual=self.residual[:num_rows],
            branch=self.branch[:num_rows],
            hidden=self.hidden[:num_rows],
            qkv=self.qkv[:num_rows],
            attended=self.attended[:num_rows],
            inner={size: inner[:num_rows] for size, inner in self.inner.items()},
            experts=None if self.experts is None else self.experts.first(num_rows),
        )

    def only(self, indices: Tensor) -> Rows:
        """The rows at ``indices`` between a layer's attention and its output projection."""
        if len(indices) == len(self):
            return self
        some = self.first(len(indices))
        return replace(some, residual=self.residual[indices], attended=self.attended[indices])
