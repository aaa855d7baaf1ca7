"""The three events, and the bytes of a message: those of vLLM's KV events, which routers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from inflight.api.kv_events import KvEventFormat

PRIMARY_MEDIUM = "GPU"
"""What consumers call the tier that the model reads from, also where that is a CPU's memory."""

HOST_MEDIUM = "CPU"
DISK_MEDIUM = "DISK"

_DP_RANK = 0
"""One engine, one rank; Dynamo refuses a batch without it."""


class CacheGroup(NamedTuple):
    """The pool of a block. Consumers that know groups find a block by its hash and its group."""

    number: int
    window: int | None
    """The sliding window of its layers, in tokens; None: they see everything."""

    def stored_fields(self) -> dict[str, Any]:
        """What vLLM says of a group in ``BlockStored``, in the order of the array form."""
        return {
            "extra_keys": None,
            "group_idx": self.number,
            "kv_cache_spec_kind": "full_attention" if self.window is None else "sliding_window",
            "kv_cache_spec_sliding_window": self.window,
        }


class BlockStored(NamedTuple):
    """Consecutive full blocks of one sequence can be reused from now on.

    Hashes are 0..2**64-1, one for each block; a consumer only compares them.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    """Of the block before the first of these; None: they begin a sequence."""
    token_ids: tuple[int, ...]
    """``block_size`` for each block, in order."""
    block_size: int
    medium: str
    group: CacheGroup | None = None
    """None: consumers are not told of groups."""

    def fields(self) -> dict[str, Any]:
        """In the order of the array form. Adapters are not served, hence the two None."""
        of_group = {} if self.group is None else self.group.stored_fields()
        return {
            "block_hashes": self.block_hashes,
            "parent_block_hash": self.parent_block_hash,
            "token_ids": self.token_ids,
            "block_size": self.block_size,
            "lora_id": None,
            "medium": self.medium,
            "lora_name": None,
            **of_group,
        }


class BlockRemoved(NamedTuple):
    """These blocks cannot be reused from this medium any more."""

    block_hashes: tuple[int, ...]
    medium: str
    group: CacheGroup | None = None

    def fields(self) -> dict[str, Any]:
        of_group = {} if self.group is None else {"group_idx": self.group.number}
        return {"block_hashes": self.block_hashes, "medium": self.medium, **of_group}


class AllBlocksCleared(NamedTuple):
    """Nothing is cached: whatever was announced before is void."""

    def fields(self) -> dict[str, Any]:
        return {}


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(seconds: float, events: Sequence[KvEvent], event_format: KvEventFormat) -> bytes:
    """The payload of one message: msgpack of ``[seconds since the epoch, events, rank]``."""
    written = [_written(event, event_format) for event in events]
    packed: bytes = msgpack.packb([seconds, written, _DP_RANK])
    return packed


def _written(event: KvEvent, event_format: KvEventFormat) -> dict[str, Any] | list[Any]:
    name, fields = type(event).__name__, event.fields()
    if event_format is KvEventFormat.MAP:
        return {"type": name, **fields}
    return [name, *fields.values()]
