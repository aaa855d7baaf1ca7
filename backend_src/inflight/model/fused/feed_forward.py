"""The feed-forward part of a layer: an MLP, or experts."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.model.fused.ops import FusedOps
from inflight.model.fused.rows import Rows
from inflight.model.fused.spec import LayerSpec, MlpSpec
from inflight.model.fused.weights import LayerWeights, MlpWeights


def feed_forward(
    ops: FusedOps,
    rows: Rows,
    spec: LayerSpec,
    weights: LayerWeights,
    out: Tensor,
    *,
    accumulate: bool,
) -> None:
    """out float32[T, hidden_size] = what the layer's MLP or experts make of ``rows.hidden``; with
    ``accumulate`` it is added to ``out``."""
    if spec.experts is not None:
        _experts(ops, rows, spec, weights, out, accumulate=accumulate)
    else:
        assert spec.mlp is not None and weights.mlp is not None
        _mlp(ops, rows, spec.mlp, weights.mlp, out, accumulate=accumulate)


def _mlp(
    ops: FusedOps, rows: Rows, spec: MlpSpec, weights: MlpWeights, out: Tensor, *, accumulate: bool
) -> None:
    inner = rows.inner[spec.intermediate_size]
    if spec.is_gated:
        ops.linear.gate_up(rows.hidden, weights.up, inner, spec.gated_activation)
    else:
        ops.linear(rows.hidden, weights.up, inner)
        ops.elementwise.activate(inner, spec.plain_activation)
    ops.linear(inner, weights.down, out, accumulate=accumulate)


def _experts(
    ops: FusedOps,
    rows: Rows,
    spec: LayerSpec,
    weights: LayerWeights,
    out: Tensor,
    *,
    accumulate: bool,
) -> None:
    """Rows are copied to lie together by expert, so that each expert reads its weights once for all
    of its rows, and not at all when there are none."""
    assert spec.experts is not None and weights.experts is not None and rows.experts is not None
    own, between, routing = weights.experts, rows.experts, rows.experts.routing
    ops.linear(rows.hidden, own.router, between.logits)
    ops.experts.route(
        between.logits, routing, is_softmax_of_chosen=spec.experts.is_softmax_of_chosen
    )
    torch.index_select(rows.hidden, 0, routing.tokens, out=between.hidden)
    num_expert_rows = len(routing.tokens)
    activation = spec.experts.mlp.gated_activation
    ops.experts.gate_ups(between.hidden, own.gate_ups, routing.ends, between.inner, activation)
    ops.experts.linears(between.inner, own.downs, routing.ends, between.results[:num_expert_rows])
    if spec.mlp is not None and weights.mlp is not None:
        shared = between.results[num_expert_rows:]
        _mlp(ops, rows, spec.mlp, weights.mlp, shared, accumulate=False)
    ops.experts.combine(between.results, routing, out, accumulate=accumulate)
