"""The sampling rules written the slow way, in float64 with full sorts, and request factories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight import OutputConfig, Request, SamplingConfig
from inflight.batch import LlmRequest

_REQUEST_FIELDS = {"bad_words", "logit_bias"}


def make_request(
    request_id: int = 0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    seed: int = 0,
    end_ids: tuple[int, ...] = (),
    log_probs: bool = False,
    **settings: Any,
) -> LlmRequest:
    """``settings``: fields of SamplingConfig, and ``bad_words`` and ``logit_bias`` of Request."""
    extra = {name: settings.pop(name) for name in _REQUEST_FIELDS & settings.keys()}
    request = Request(
        input_token_ids=tuple(prompt),
        max_tokens=64,
        sampling_config=SamplingConfig(**settings),
        output_config=OutputConfig(return_log_probs=log_probs),
        **extra,
    )
    return LlmRequest(request_id, request, arrival_time=0, rank=0, end_ids=end_ids, seed=seed)


def generate(request: LlmRequest, *token_ids: int) -> None:
    """Lets the request pass its context phase, if it must, and generate these tokens."""
    for token_id in token_ids:
        request.advance(request.context_position, request.num_tokens - request.context_position)
        request.append(token_id)


def edited_logits(request: LlmRequest, logits: npt.NDArray[np.float32]) -> list[float]:
    """One row after bias, penalties and masks."""
    config = request.request.sampling_config
    tokens = request.token_ids.tolist()
    row = [float(value) for value in logits]
    for token_id, bias in request.request.logit_bias.items():
        row[token_id] += bias
    for token_id in set(tokens):
        value = row[token_id]
        scaled = (
            value / config.repetition_penalty if value > 0 else value * config.repetition_penalty
        )
        row[token_id] = (
            scaled - config.presence_penalty - config.frequency_penalty * tokens.count(token_id)
        )
    if request.num_generated_tokens < config.min_tokens:
        for token_id in request.end_ids:
            row[token_id] = -math.inf
    for *prefix, last in request.request.bad_words:
        if tokens[len(tokens) - len(prefix) :] == prefix:
            row[last] = -math.inf
    return row


def softmax(row: Sequence[float], temperature: float = 1.0) -> list[float]:
    peak = max(row)
    weights = [math.exp((value - peak) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def distribution(request: LlmRequest, logits: npt.NDArray[np.float32]) -> dict[int, float]:
    """Surviving id -> probability, by id, of a request that samples."""
    config = request.request.sampling_config
    probabilities = softmax(
        edited_logits(request, logits),
        1.0 if config.temperature is None else config.temperature,
    )
    ranked = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    if config.min_p:
        floor = config.min_p * probabilities[ranked[0]]
        ranked = [i for i in ranked if probabilities[i] >= floor]
    if config.top_k:
        ranked = ranked[: config.top_k]
    if config.top_p:
        left = sum(probabilities[i] for i in ranked)
        reached, kept = 0.0, []
        for i in ranked:
            kept.append(i)
            reached += probabilities[i] / left
            if reached >= config.top_p:
                break
        ranked = kept
    left = sum(probabilities[i] for i in ranked)
    return {i: probabilities[i] / left for i in sorted(ranked)}
