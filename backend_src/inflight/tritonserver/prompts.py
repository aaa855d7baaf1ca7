"""The token ids of a prompt, from text, a chat or ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.errors import InvalidRequestError, UnsupportedRequestError
from inflight.text.tokenizer import Tokenizer


def prompt_ids(
    fields: Mapping[str, Any], tokenizer: Tokenizer | None, max_input_chars: int
) -> tuple[int, ...]:
    """The prompt of one batch element, at least one id.

    ``fields``: text_input, messages, or input_ids with input_lengths. Raises InvalidRequestError
    unless exactly one of the three is there and within its bounds; an empty text_input counts as
    absent beside ``messages``, as clients send it to satisfy a required input.
    """
    if "input_ids" in fields:
        return _given_ids(fields)
    text, messages = fields.get("text_input"), fields.get("messages")
    if text and messages:
        raise InvalidRequestError("messages", "...", "and text_input are both given: send one")
    name = "messages" if messages else "text_input"
    if text is None and messages is None:
        raise InvalidRequestError(name, "", "is missing: send text_input, messages or input_ids")
    if tokenizer is None:
        raise UnsupportedRequestError(name, "the checkpoint has no tokenizer: send input_ids")
    if messages:
        return tuple(tokenizer.encode_chat(_bounded(name, messages, max_input_chars)))
    ids = tuple(tokenizer.encode(_bounded(name, text or "", max_input_chars)))
    if not ids:
        raise InvalidRequestError(name, "", "is empty: a prompt needs at least one token")
    return ids


def _given_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    ids = fields["input_ids"]
    if not len(ids):
        raise InvalidRequestError("input_ids", [], "is empty: a prompt needs at least one token")
    length = fields.get("input_lengths", len(ids))
    if not 0 < length <= len(ids):
        raise InvalidRequestError(
            "input_lengths", length, f"must be between 1 and the {len(ids)} ids of input_ids"
        )
    return tuple(ids[:length].tolist())


def _bounded(name: str, text: str, max_input_chars: int) -> str:
    if len(text) > max_input_chars:
        raise InvalidRequestError(
            name,
            f"{len(text)} characters",
            f"are too many: at most {max_input_chars} (max_input_chars) are allowed",
        )
    return text
