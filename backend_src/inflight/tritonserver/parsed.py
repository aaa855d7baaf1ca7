"""What the adapters hand to each other: a Triton request in plain Python, free of ``pb_utils``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from inflight.api.request import Request


class Door(Enum):
    """Which face of ``inflight_llm`` a request came through."""

    TEXT = "text"
    """``text_input`` or ``messages`` in, text deltas out: the direct door."""
    IDS = "ids"
    """``input_ids`` in; ids, detokenizer window and ``text_length`` out: the ensemble's door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Optional outputs that the client asked for."""

    log_probs: bool = False
    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """The fields of one Triton request under their canonical names, values not yet checked.

    Text fields are ``str``; lists of batch elements stand behind ``elements``.
    """

    triton_request_id: str
    """"" when the client gave none."""
    door: Door | None
    """None for a ``stop`` request."""
    stop: bool
    streaming: bool
    elements: tuple[Mapping[str, Any], ...]
    """One mapping (canonical field name -> Python value or numpy array) for each batch element."""
    wants: Wants
    requested_outputs: frozenset[str]
    """Names of the outputs that the client, or the ensemble around us, takes; others stay here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A RawRequest after tokenizing and validation, ready for the executor."""

    triton_request_id: str
    door: Door
    streaming: bool
    requests: tuple[Request, ...]
    """One for each batch element; responses carry its place as ``batch_index``."""
    wants: Wants
