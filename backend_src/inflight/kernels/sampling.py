"""One token of each row of logits, and its log-prob: greedy or drawn, without sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.language import jit, tl
from inflight.kernels.sampling_rows import SamplingRows
from inflight.kernels.thresholds import find_last, is_kept, key_of, load_logits, weight_of

WIDE = 4096
"""Logits that a program takes at a time."""
NARROW = 2048
"""The same where it keeps two numbers of each for every value of a digit."""


def sample(logits: Tensor, rows: SamplingRows, ids: Tensor, log_probs: Tensor) -> None:
    """ids int32[R], and log_probs float32[R] of rows that want one, 0 of the others; nothing is
    written of rows that are left.

    ``logits``: float32[R, V] after ``edit_logits``, with the numbers of a row side by side; a row
    that is not left has a largest one, which is finite, and no NaN. The rules, their order and the
    meaning of log-probs are those of ``inflight.sampling.Sampler``. Weights are float32 and their
    sums float64; those of a search for top_p float32 in each lane. One program computes a row.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    assert len(ids) == len(log_probs) == len(rows.is_left) == num_rows
    if num_rows == 0:
        return
    _sample[(num_rows,)](
        logits,
        ids,
        log_probs,
        rows.is_left,
        rows.wants_log_prob,
        rows.temperatures,
        rows.top_ks,
        rows.top_ps,
        rows.min_p_offsets,
        rows.uniforms,
        int(rows.normalize_log_probs),
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        WIDE=WIDE,
        NARROW=NARROW,
        num_warps=8,
    )


@jit(
    (
        "ids_ptr", "log_probs_ptr", "is_left_ptr", "wants_log_prob_ptr", "temperatures_ptr",
        "top_ks_ptr", "top_ps_ptr", "min_p_offsets_ptr", "uniforms_ptr", "normalizes",
    )
)  # fmt: skip
def _sample(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    is_left_ptr: tl.tensor,
    wants_log_prob_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    min_p_offsets_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    normalizes: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_left_ptr + row) != 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    peak, token = _largest(row_ptr, VOCAB_SIZE, WIDE)
    temperature = tl.load(temperatures_ptr + row)
    # Of a greedy row one token survives.
    weight = tl.full([], 1.0, tl.float64)
    total = tl.full([], 1.0, tl.float64)
    if temperature > 0:
        least = (peak.to(tl.float64) + tl.load(min_p_offsets_ptr + row)).to(tl.float32)
        last_key = -(2**31)
        last_id = VOCAB_SIZE
        top_k = tl.load(top_ks_ptr + row)
        if top_k < VOCAB_SIZE:
            without_top_k = (peak, temperature, least, last_key, last_id)
            last_key, last_id = find_last(
                row_ptr, top_k.to(tl.float64), without_top_k, VOCAB_SIZE, NARROW, False
            )
        rules = (peak, temperature, least, last_key, last_id)
        last_weight_key = -1
        last_weight_id = VOCAB_SIZE
        total = _total(row_ptr, rules, (last_weight_key, last_weight_id), VOCAB_SIZE, WIDE)
        top_p = tl.load(top_ps_ptr + row)
        if top_p < 1:
            last_weight_key, last_weight_id = find_last(
                row_ptr, top_p * total, rules, VOCAB_SIZE, NARROW, True
            )
            total = _total(row_ptr, rules, (last_weight_key, last_weight_id), VOCAB_SIZE, WIDE)
        target = tl.load(uniforms_ptr + row) * total
        last_weight = (last_weight_key, last_weight_id)
        token = _pick(row_ptr, target, rules, last_weight, VOCAB_SIZE, WIDE)
        weight = weight_of(tl.load(row_ptr + token), peak, temperature).to(tl.float64)
    log_prob = tl.full([], 0.0, tl.float64)
    if tl.load(wants_log_prob_ptr + row) != 0:
        if normalizes != 0:
            log_prob = tl.log(weight / total)
        else:
            all_logits = (peak, 1.0, float("-inf"), -(2**31), VOCAB_SIZE)
            everything = _total(row_ptr, all_logits, (-1, VOCAB_SIZE), VOCAB_SIZE, WIDE)
            chosen = tl.load(row_ptr + token).to(tl.float64)
            log_prob = chosen - peak.to(tl.float64) - tl.log(everything)
    tl.store(ids_ptr + row, token)
    tl.store(log_probs_ptr + row, log_prob.to(tl.float32))


@jit()
def _largest(row_ptr: tl.tensor, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest logit, and the lowest id that has it."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    its_ids = tl.full([BLOCK], VOCAB_SIZE, tl.int32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        ids, _, x = load_logits(row_ptr, first, VOCAB_SIZE, BLOCK)
        its_ids = tl.where(x > largest, ids, its_ids)
        largest = tl.maximum(largest, x)
    peak = tl.max(largest, axis=0)
    return peak, tl.min(tl.where(largest == peak, its_ids, VOCAB_SIZE), axis=0)


@jit()
def _weights(
    row_ptr: tl.tensor,
    first: tl.tensor,
    rules: tl.tuple,
    last_weight: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Ids from ``first`` on and their weights in float64, 0 of those that do not survive.

    ``rules``: as in thresholds.py; ``last_weight``: key and id of the last one that top_p leaves.
    """
    ids, survives, x = load_logits(row_ptr, first, VOCAB_SIZE, BLOCK)
    peak, temperature, least, last_key, last_id = rules
    last_weight_key, last_weight_id = last_weight
    weight = weight_of(x, peak, temperature)
    survives = survives & (x >= least) & is_kept(key_of(x), ids, last_key, last_id)
    weight_key = weight.to(tl.int32, bitcast=True)
    survives = survives & is_kept(weight_key, ids, last_weight_key, last_weight_id)
    return ids, tl.where(survives, weight, 0.0).to(tl.float64)


@jit()
def _total(
    row_ptr: tl.tensor,
    rules: tl.tuple,
    last_weight: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sum of the weights that survive, tile by tile, as ``_pick`` meets them."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, VOCAB_SIZE, BLOCK):
        _, weights = _weights(row_ptr, first, rules, last_weight, VOCAB_SIZE, BLOCK)
        total += tl.sum(weights, axis=0)
    return total


@jit()
def _pick(
    row_ptr: tl.tensor,
    target: tl.tensor,
    rules: tl.tuple,
    last_weight: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id whose weight and those of lower ids exceed ``target``; where rounding leaves
    none, the last one that survives. Never one of weight 0."""
    before = tl.full([], 0.0, tl.float64)
    before_tile = tl.full([], 0.0, tl.float64)
    tile = 0
    for first in range(0, VOCAB_SIZE, BLOCK):
        _, weights = _weights(row_ptr, first, rules, last_weight, VOCAB_SIZE, BLOCK)
        here = tl.sum(weights, axis=0)
        # The last tile that begins at or before the target is its own.
        is_it = (here > 0) & (before <= target)
        tile = tl.where(is_it, first, tile)
        before_tile = tl.where(is_it, before, before_tile)
        before += here
    ids, weights = _weights(row_ptr, tile, rules, last_weight, VOCAB_SIZE, BLOCK)
    exceeds = (before_tile + tl.cumsum(weights, axis=0) > target) & (weights > 0)
    first_id = tl.min(tl.where(exceeds, ids, VOCAB_SIZE), axis=0)
    last_id_here = tl.max(tl.where(weights > 0, ids, 0), axis=0)
    return tl.where(first_id < VOCAB_SIZE, first_id, last_id_here)
