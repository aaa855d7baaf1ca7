"""What ends a request: its length, its end ids and its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.api.config import InflightConfig
from inflight.errors import InvalidRequestError
from inflight.text.tokenizer import Tokenizer

NO_END_ID = -1
"""TensorRT-LLM's way to say in ``end_id`` that no token ends the answer."""


def max_tokens(fields: Mapping[str, Any], num_input_tokens: int, config: InflightConfig) -> int:
    """The field, or the default; the default alone gives way to a known max_seq_len."""
    stated: int | None = fields.get("max_tokens")
    if stated is not None:
        return stated
    if config.max_seq_len:
        return max(1, min(config.default_max_tokens, config.max_seq_len - num_input_tokens))
    return config.default_max_tokens


def end_ids(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """None: the checkpoint's own; (): none. Raises InvalidRequestError outside the vocabulary."""
    end_id: int | None = fields.get("end_id")
    if end_id is None:
        return None
    if end_id == NO_END_ID:
        return ()
    if end_id < 0 or (tokenizer is not None and end_id >= tokenizer.vocab_size):
        size = "the vocabulary size" if tokenizer is None else tokenizer.vocab_size
        raise InvalidRequestError("end_id", end_id, f"must be -1 (none) or 0 to below {size}")
    return (end_id,)


def time_limit_ms(fields: Mapping[str, Any]) -> float | None:
    """The shortest of the limits that the request states; None without one.

    Raises InvalidRequestError for a limit that is not larger than 0.
    """
    for name in ("timeout_us", "allotted_time_ms"):
        if name in fields and not fields[name] > 0:
            raise InvalidRequestError(name, fields[name], "must be larger than 0")
    stated = []
    if "timeout_us" in fields:
        stated.append(fields["timeout_us"] / 1000)
    if "allotted_time_ms" in fields:
        stated.append(fields["allotted_time_ms"])
    return min(stated, default=None)
