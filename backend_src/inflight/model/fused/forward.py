"""FusedDecoder: one packed forward as a loop over fused operations.

The residual stream is fp32, and what the linears read is in the engine's dtype. Operations write in
place, into buffers that are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache

import torch
from torch import Tensor

from inflight.model.fused.decoder_tensors import NormWeights
from inflight.model.fused.feed_forward import feed_forward
from inflight.model.fused.ops import FusedOps, recording_ops
from inflight.model.fused.rope_tables import rope_tables
from inflight.model.fused.rows import Rows
from inflight.model.fused.spec import DecoderSpec, LayerSpec, NormKind
from inflight.model.fused.weights import DecoderWeights, LayerWeights
from inflight.model.runner import PackedInputs, nothing_beside
from inflight.native.attention import LayerRules
from inflight.native.library import NativeLibrary
from inflight.native.recorded_calls import CallRecorder, RecordedCalls

_Layer = tuple[int, tuple[LayerSpec, LayerWeights, LayerRules]]


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
        library: NativeLibrary | None = None,
    ) -> None:
        """``max_num_tokens``: rows of an iteration at most; ``max_seq_len``: tokens of a sequence
        at most. ``library``: that of ``ops``, whose calls are recorded in the first iteration;
        None: each is made from here."""
        self.spec = spec
        self.ops = ops
        self.dtype = weights.embedding.dtype
        """Of activations, embedding and KV storage."""
        self.weights = weights
        self._rows = Rows.allocate(max_num_tokens, spec, self.dtype)
        self._first_rows = lru_cache(maxsize=64)(self._rows.first)
        self._stream_epsilon = spec.norm_epsilon / spec.residual_multiplier**2
        self._embedding_scale = spec.embedding_multiplier / spec.residual_multiplier
        rules = _layer_rules(spec, weights, max_seq_len)
        self._layers: tuple[_Layer, ...] = tuple(
            enumerate(zip(spec.layers, weights.layers, rules, strict=True))
        )
        # Experts gather their rows in torch.
        is_recordable = all(layer.experts is None for layer in spec.layers)
        self._library = library if is_recordable else None
        self._recorded: RecordedCalls | None = None
        """What ``hidden`` does with all rows, after the embedding."""
        self._num_calls_for_all = 0
        """The first of the recorded calls, those up to the last layer's attention."""
        tables = [rule.max_positions for rule in rules if rule.max_positions is not None]
        self._max_positions = min(tables, default=None)
        """That every rope table has; None: there is none."""

    @property
    def max_num_tokens(self) -> int:
        return len(self._rows)

    @property
    def is_recorded(self) -> bool:
        """Whether the calls of the layers are made in one by now."""
        return self._recorded is not None

    def unrecorded(self) -> FusedDecoder:
        """The same, with the same KV cache, but each call is made from here: to look at them."""
        decoder = copy(self)
        decoder._library = None
        return decoder

    def forward(self, inputs: PackedInputs) -> Tensor:
        """float32[R, vocab_size], new: the logits of the rows in ``inputs.logits_indices``."""
        return self.logits(self.hidden(inputs))

    def hidden(self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside) -> Tensor:
        """[R, hidden_size]: what the head reads of the rows in ``inputs.logits_indices``. A buffer
        that the next forward overwrites. ``launched``: see ``ModelRunner.forward``."""
        rows = self._first_rows(len(inputs.token_ids))
        wanted = torch.from_numpy(inputs.logits_indices)
        self.ops.attention.plan(inputs)
        token_ids = torch.from_numpy(inputs.token_ids)
        self.ops.elementwise.embed(
            self.weights.embedding, token_ids, rows.residual, self._embedding_scale
        )
        launched()
        if self._library is None:
            self._attend_all(rows)
        else:
            # Calls that are not recorded assert it themselves.
            assert self._max_positions is None or inputs.context_lens.max() <= self._max_positions
            self._recorded = self._recorded or self._record(rows, self._library)
            if len(wanted) == len(rows):
                self._recorded.make(len(rows))
                return rows.hidden
            self._recorded.make(len(rows), self._num_calls_for_all)
        # All K and V are written: only the rows that sample go on.
        rows = rows.only(wanted)
        if len(rows):
            self._finish_last(rows)
        return rows.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab_size], new, of the rows that ``hidden`` gave."""
        logits = torch.empty(len(hidden), self.spec.vocab_size)
        if not len(hidden):
            return logits
        self.ops.linear.logits(hidden, self.weights.head, logits)
        cap = self.spec.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """int32[R]: the id of each row's largest logit, the lowest of equal ones.

        None where only the logits can tell: soft-capped ones become equal, and rows that are not
        finite may have none.
        """
        if self.spec.logits_softcap is not None or not bool(torch.isfinite(hidden).all()):
            return None
        return self.ops.linear.argmax(hidden, self.weights.head)

    def _attend_all(self, rows: Rows) -> None:
        """All layers, up to what the last one's attention gives."""
        *layers, last = self._layers
        for layer in layers:
            self._attend(rows, layer)
            self._finish(rows, layer)
        self._attend(rows, last)

    def _finish_last(self, rows: Rows) -> None:
        self._finish(rows, self._layers[-1])
        self._read(rows, self.weights.norm)

    def _record(self, rows: Rows, library: NativeLibrary) -> RecordedCalls:
        """The buffers begin at the same place for any number of rows."""
        recorder, decoder = CallRecorder(len(rows)), copy(self)
        decoder.ops = recording_ops(self.ops, recorder)
        decoder._attend_all(rows)
        self._num_calls_for_all = len(recorder.calls)
        decoder._finish_last(rows)
        return RecordedCalls(library, recorder)

    def _attend(self, rows: Rows, layer: _Layer) -> None:
        """Up to what attention gives."""
        number, (_, weights, rules) = layer
        self._read(rows, weights.before_attention)
        self.ops.linear(rows.hidden, weights.qkv, rows.qkv)
        self.ops.attention.attend(number, rules, rows.qkv, rows.attended)

    def _finish(self, rows: Rows, layer: _Layer) -> None:
        """The output projection of attention, and the feed-forward part."""
        _, (spec, weights, _) = layer
        if self.spec.is_parallel:
            # Attention adds to the residual after the feed-forward part has read it.
            self._read(rows, weights.before_mlp)
            self._add_attention(rows, weights)
        else:
            self._add_attention(rows, weights)
            self._read(rows, weights.before_mlp)
        out, accumulate = self._target(rows, weights.after_mlp)
        feed_forward(self.ops, rows, spec, weights, out, accumulate=accumulate)
        self._add_branch(rows, weights.after_mlp)

    def _add_attention(self, rows: Rows, weights: LayerWeights) -> None:
        out, accumulate = self._target(rows, weights.after_attention)
        self.ops.linear(rows.attended, weights.output, out, accumulate=accumulate)
        self._add_branch(rows, weights.after_attention)

    def _target(self, rows: Rows, norm: NormWeights | None) -> tuple[Tensor, bool]:
        """Where a block writes, and whether it adds to what is there: to the residual itself, where
        no norm comes between."""
        return (rows.residual, True) if norm is None else (rows.branch, False)

    def _add_branch(self, rows: Rows, norm: NormWeights | None) -> None:
        """What a block has written under ``norm`` goes to the residual."""
        if norm is not None:
            epsilon = self.spec.norm_epsilon
            self._normalize(rows.branch, norm, epsilon, rows.residual, accumulate=True)

    def _read(self, rows: Rows, norm: NormWeights | None) -> None:
        """hidden = the residual, as a block reads it."""
        if norm is None:
            self.ops.elementwise.copy(rows.residual, rows.hidden)
        else:
            self._normalize(rows.residual, norm, self._stream_epsilon, rows.hidden)

    def _normalize(
        self, x: Tensor, norm: NormWeights, epsilon: float, out: Tensor, *, accumulate: bool = False
    ) -> None:
        ops = self.ops.elementwise
        if self.spec.norm_kind is NormKind.RMS:
            ops.rms_norm(x, norm.weight, epsilon, out, accumulate=accumulate)
        else:
            ops.layer_norm(x, norm.weight, norm.bias, epsilon, out, accumulate=accumulate)


def _layer_rules(spec: DecoderSpec, weights: DecoderWeights, max_seq_len: int) -> list[LayerRules]:
    tables = rope_tables(spec, max_seq_len)
    return [
        LayerRules(
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            sliding_window=layer.sliding_window,
            cos_sin=table,
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            norm_epsilon=spec.norm_epsilon,
        )
        for layer, own, table in zip(spec.layers, weights.layers, tables, strict=True)
    ]
