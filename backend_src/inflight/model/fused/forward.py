"""FusedDecoder: one packed forward as a loop over fused operations.

The residual stream is fp32, and what the linears read is in the engine's dtype. Operations write in
place, into buffers that are made once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.model.fused.ops import FusedOps
from inflight.model.fused.spec import DecoderSpec, RopeSpec
from inflight.model.fused.weights import DecoderWeights, LayerWeights
from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules
from inflight.native.elementwise import rope_table
from inflight.native.packed import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Activations of T rows."""

    residual: Tensor
    """float32[T, hidden_size], the residual stream divided by residual_multiplier: what is added to
    it needs no factor then, and RMSNorm with an epsilon of its own takes it out again."""
    branch: Tensor
    """float32[T, hidden_size], what a block adds to the residual, where a norm comes between."""
    hidden: Tensor
    """[T, hidden_size], what a block reads."""
    qkv: Tensor
    """float32[T, qkv_size]."""
    attended: Tensor
    """[T, query_size]."""
    inner: Tensor
    """[T, intermediate_size]."""

    @classmethod
    def allocate(cls, num_rows: int, spec: DecoderSpec, dtype: torch.dtype) -> _Rows:
        return cls(
            residual=torch.empty(num_rows, spec.hidden_size),
            branch=torch.empty(num_rows, spec.hidden_size),
            hidden=torch.empty(num_rows, spec.hidden_size, dtype=dtype),
            qkv=torch.empty(num_rows, spec.qkv_size),
            attended=torch.empty(num_rows, spec.query_size, dtype=dtype),
            inner=torch.empty(num_rows, spec.intermediate_size, dtype=dtype),
        )

    def __len__(self) -> int:
        return len(self.residual)

    def first(self, num_rows: int) -> _Rows:
        return _Rows(
            residual=self.residual[:num_rows],
            branch=self.branch[:num_rows],
            hidden=self.hidden[:num_rows],
            qkv=self.qkv[:num_rows],
            attended=self.attended[:num_rows],
            inner=self.inner[:num_rows],
        )

    def only(self, indices: Tensor) -> _Rows:
        """The rows at ``indices`` between a layer's attention and its output projection."""
        if len(indices) == len(self):
            return self
        some = self.first(len(indices))
        return replace(some, residual=self.residual[indices], attended=self.attended[indices])


class FusedDecoder:
    """The layers, and the attention that holds their KV cache. Used from one thread."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        ops: FusedOps,
        *,
        max_num_tokens: int,
        max_seq_len: int,
    ) -> None:
        """``max_num_tokens``: rows of an iteration at most; ``max_seq_len``: tokens of a sequence
        at most."""
        self.spec = spec
        self.ops = ops
        self.dtype = weights.embedding.dtype
        """Of activations, embedding and KV storage."""
        self.weights = weights
        self._rows = _Rows.allocate(max_num_tokens, spec, self.dtype)
        self._stream_epsilon = spec.norm_epsilon / spec.residual_multiplier**2
        self._embedding_scale = spec.embedding_multiplier / spec.residual_multiplier
        rules = _layer_rules(spec, weights, max_seq_len)
        self._layers = tuple(enumerate(zip(weights.layers, rules, strict=True)))

    @property
    def max_num_tokens(self) -> int:
        return len(self._rows)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """float32[R, vocab_size], new: the logits of the rows in ``inputs.logits_indices``."""
        rows = self._rows.first(len(inputs.token_ids))
        wanted = torch.from_numpy(inputs.logits_indices)
        self.ops.attention.plan(inputs)
        token_ids = torch.from_numpy(inputs.token_ids)
        self.ops.elementwise.embed(
            self.weights.embedding, token_ids, rows.residual, self._embedding_scale
        )
        last = len(self._layers) - 1
        for i, (layer, rules) in self._layers:
            self._read(rows, layer.before_attention)
            self.ops.linear(rows.hidden, layer.qkv, rows.qkv)
            self.ops.attention.attend(i, rules, rows.qkv, rows.attended)
            if i == last:
                # All K and V are written: only the rows that sample go on.
                rows = rows.only(wanted)
            self._finish(rows, layer)
        return self._logits(rows)

    def _finish(self, rows: _Rows, layer: LayerWeights) -> None:
        """The output projection of attention, and the MLP."""
        if not len(rows):
            return
        self._add(rows, rows.attended, layer.output, layer.after_attention)
        self._read(rows, layer.before_mlp)
        self.ops.linear.gate_up(rows.hidden, layer.gate_up, rows.inner, self.spec.activation)
        self._add(rows, rows.inner, layer.down, layer.after_mlp)

    def _read(self, rows: _Rows, norm: Tensor | None) -> None:
        """hidden = the residual, as a block reads it."""
        if norm is None:
            rows.hidden.copy_(rows.residual)
        else:
            self.ops.elementwise.rms_norm(rows.residual, norm, self._stream_epsilon, rows.hidden)

    def _add(self, rows: _Rows, x: Tensor, linear: PackedLinear, norm: Tensor | None) -> None:
        """residual += norm(linear(x))."""
        if norm is None:
            self.ops.linear(x, linear, rows.residual, accumulate=True)
            return
        self.ops.linear(x, linear, rows.branch)
        # In place: every row is read to its end before any of it is written.
        self.ops.elementwise.rms_norm(rows.branch, norm, self.spec.norm_epsilon, rows.branch)
        rows.residual.add_(rows.branch)

    def _logits(self, rows: _Rows) -> Tensor:
        logits = torch.empty(len(rows), self.spec.vocab_size)
        if not len(rows):
            return logits
        self._read(rows, self.weights.norm)
        self.ops.linear.logits(rows.hidden, self.weights.head, logits)
        cap = self.spec.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _layer_rules(spec: DecoderSpec, weights: DecoderWeights, max_seq_len: int) -> list[LayerRules]:
    tables: dict[RopeSpec | None, Tensor | None] = {None: None}
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in tables:
            frequencies = torch.tensor(layer.rope.inverse_frequencies)
            tables[layer.rope] = rope_table(frequencies, max_seq_len, layer.rope.attention_factor)
    return [
        LayerRules(
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            sliding_window=layer.sliding_window,
            cos_sin=tables[layer.rope],
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            norm_epsilon=spec.norm_epsilon,
        )
        for layer, own in zip(spec.layers, weights.layers, strict=True)
    ]
