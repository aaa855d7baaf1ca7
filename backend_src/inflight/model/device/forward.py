"""DeviceDecoder: one packed forward as a loop over a device's operations.

The residual stream is fp32; what the linears read and give is in the dtype of the activations. What
a block adds to the stream is added by the norm that reads it next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.model.device.ops import DeviceOps, LayerRules
from inflight.model.device.rows import DeviceRows
from inflight.model.device.weights import DeviceLayer, DeviceWeights
from inflight.model.fused.decoder_tensors import NormWeights
from inflight.model.fused.rope_tables import rope_tables
from inflight.model.fused.spec import DecoderSpec, LayerSpec, NormKind


class DeviceDecoder:
    """The layers, without their KV storage. It keeps nothing of an iteration."""

    def __init__(
        self, spec: DecoderSpec, weights: DeviceWeights, ops: DeviceOps, *, max_seq_len: int
    ) -> None:
        """``max_seq_len``: tokens of a sequence at most."""
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.max_seq_len = max_seq_len
        self.dtype = weights.embedding.dtype
        """Of the activations."""
        self._embedding_scale = spec.embedding_multiplier / spec.residual_multiplier
        # The stream is kept divided by residual_multiplier, as fused/rows.py says.
        self._stream_epsilon = spec.norm_epsilon / spec.residual_multiplier**2
        rules = _layer_rules(spec, weights.layers, max_seq_len, weights.embedding.device)
        self._layers = tuple(zip(spec.layers, weights.layers, rules, strict=True))

    def forward(self, rows: DeviceRows, storage: Tensor) -> Tensor:
        """float32[R, vocab_size], new: the logits of the rows that are wanted.

        ``storage``: of ``kernels/kv_layout.py``, where K and V of all rows are written.
        """
        stream = F.embedding(rows.token_ids, self.weights.embedding).float()
        if self._embedding_scale != 1.0:
            stream *= self._embedding_scale
        added: Tensor | None = None
        last = len(self._layers) - 1
        for i, (spec, weights, rules) in enumerate(self._layers):
            x = self._read(stream, added, weights.before_attention)
            attended = self.ops.attend(weights.qkv(x), storage[i], rows, rules)
            if i == last and rows.logits_indices is not None:
                # All K and V are written: only the rows that sample go on.
                stream, attended = stream[rows.logits_indices], attended[rows.logits_indices]
            if not len(attended):
                return stream.new_empty(0, self.spec.vocab_size)
            added = self._finish(stream, attended, spec, weights)
        return self._logits(self._read(stream, added, self.weights.norm))

    def _finish(
        self, stream: Tensor, attended: Tensor, spec: LayerSpec, weights: DeviceLayer
    ) -> Tensor:
        """What the rest of a layer still has to add to the stream: of the output projection and the
        feed-forward part."""
        if self.spec.is_parallel:
            x = self._read(stream, None, weights.before_mlp)
            branch = self._normalised(weights.output(attended), weights.after_attention)
            branch += self._normalised(self._feed_forward(x, spec, weights), weights.after_mlp)
            return branch
        branch = self._normalised(weights.output(attended), weights.after_attention)
        x = self._read(stream, branch, weights.before_mlp)
        return self._normalised(self._feed_forward(x, spec, weights), weights.after_mlp)

    def _feed_forward(self, x: Tensor, spec: LayerSpec, weights: DeviceLayer) -> Tensor:
        own = None
        if spec.mlp is not None:
            assert weights.mlp is not None
            own = weights.mlp.down(self.ops.activated(weights.mlp.up(x), spec.mlp))
        if spec.experts is None:
            assert own is not None
            return own
        assert weights.experts is not None
        logits = weights.experts.router.in_fp32(x)
        return self.ops.mixed(x, logits, weights.experts.tensors, spec.experts, own)

    def _read(self, stream: Tensor, added: Tensor | None, norm: NormWeights | None) -> Tensor:
        """The stream as a block reads it, once ``added`` is in it."""
        if norm is not None and self.spec.norm_kind is NormKind.RMS:
            out = stream.new_empty(stream.shape, dtype=self.dtype)
            self.ops.rms_norm(stream, norm.weight, self._stream_epsilon, out, delta=added)
            return out
        if added is not None:
            stream += added
        if norm is None:
            return stream.to(self.dtype)
        return self._layer_norm(stream, norm, self._stream_epsilon)

    def _normalised(self, branch: Tensor, norm: NormWeights | None) -> Tensor:
        """What a block adds, after the norm that comes between."""
        if norm is None:
            return branch
        if self.spec.norm_kind is NormKind.RMS:
            self.ops.rms_norm(branch, norm.weight, self.spec.norm_epsilon, branch)
            return branch
        return self._layer_norm(branch, norm, self.spec.norm_epsilon)

    def _layer_norm(self, x: Tensor, norm: NormWeights, epsilon: float) -> Tensor:
        normalised = F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, epsilon)
        return normalised.to(self.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.weights.head.in_fp32(hidden)
        cap = self.spec.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _layer_rules(
    spec: DecoderSpec, layers: Sequence[DeviceLayer], max_seq_len: int, device: torch.device
) -> list[LayerRules]:
    tables = rope_tables(spec, max_seq_len, device)
    return [
        LayerRules(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            sliding_window=layer.sliding_window,
            cos_sin=table,
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            norm_epsilon=spec.norm_epsilon,
        )
        for layer, own, table in zip(spec.layers, layers, tables, strict=True)
    ]
