"""The sampler's rules on a device written out in torch, row by row and with whole sorts: the
reference. It waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.sampling_rows import SamplingRows


def edit_logits(logits: Tensor, rows: SamplingRows) -> None:
    """As ``kernels.logit_edits.edit_logits``."""
    rows.counts[rows.fresh_slots] = 0
    for row, is_left in enumerate(rows.is_left.tolist()):
        counts = rows.counts[int(rows.slots[row])]
        counted = rows.counted_ids[_span(rows.counted_starts, row)]
        counts.index_add_(0, counted, torch.ones_like(counted))
        if is_left:
            continue
        biased = _span(rows.bias_starts, row)
        logits[row, rows.bias_ids[biased]] += rows.biases[biased]
        if rows.has_penalties:
            _penalise(logits[row], counts, rows, row)
        _mask(logits[row], rows.masked_ids[_span(rows.masked_starts, row)])


def sample(logits: Tensor, rows: SamplingRows, ids: Tensor, log_probs: Tensor) -> None:
    """As ``kernels.sampling.sample``."""
    for row, is_left in enumerate(rows.is_left.tolist()):
        if is_left:
            continue
        x = logits[row]
        peak = x.max()
        token = (x == peak).nonzero()[0, 0]
        weights = torch.zeros_like(x).index_fill_(0, token, 1.0)  # greedy: one survivor
        if rows.temperatures[row] > 0:
            weights = _surviving_weights(x, peak, rows, row)
            token = _picked(weights, float(rows.uniforms[row]))
        log_prob = torch.zeros(())
        if rows.wants_log_prob[row] and rows.normalize_log_probs:
            log_prob = (weights[token] / weights.double().sum()).log()
        elif rows.wants_log_prob[row]:
            log_prob = x[token].double() - peak - (x - peak).exp().double().sum().log()
        ids[row], log_probs[row] = token, log_prob


def _span(starts: Tensor, row: int) -> slice:
    return slice(int(starts[row]), int(starts[row + 1]))


def _penalise(x: Tensor, counts: Tensor, rows: SamplingRows, row: int) -> None:
    repetition = rows.repetition_penalties[row]
    changed = torch.where(x > 0, x / repetition, x * repetition)
    changed -= rows.presence_penalties[row]
    changed -= rows.frequency_penalties[row] * counts
    x.copy_(torch.where(counts > 0, changed, x))


def _mask(x: Tensor, ids: Tensor) -> None:
    masked = x.index_fill(0, ids.long(), -torch.inf)
    if masked.max() > -torch.inf:
        x.copy_(masked)


def _surviving_weights(x: Tensor, peak: Tensor, rows: SamplingRows, row: int) -> Tensor:
    """float32[V], 0 of what does not survive. A stable sort ranks equal values by id."""
    order = x.sort(descending=True, stable=True).indices
    survives = torch.zeros_like(x, dtype=torch.bool)
    survives[order[: rows.top_ks[row]]] = True
    survives &= x >= (peak.double() + rows.min_p_offsets[row]).float()
    weights = torch.where(survives, ((x - peak) / rows.temperatures[row]).exp(), 0.0)
    top_p = float(rows.top_ps[row])
    if top_p < 1:
        ranked, order = weights.sort(descending=True, stable=True)
        wanted = top_p * weights.double().sum()
        count = int(torch.searchsorted(ranked.double().cumsum(0), wanted)) + 1
        weights[order[count:]] = 0.0
    return weights


def _picked(weights: Tensor, uniform: float) -> Tensor:
    """The first id whose cumulative weight exceeds ``uniform`` of all."""
    reached = weights.double().cumsum(0)
    first = torch.searchsorted(reached, uniform * reached[-1], right=True)
    # uniform * sum may round up to the sum itself.
    return torch.minimum(first, weights.nonzero().max())
