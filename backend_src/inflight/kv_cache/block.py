"""Block, the unit of KV memory, and BlockKey, the name of what is written in a full one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from inflight.kv_cache.radix_tree import Node


class Block:
    """``tokens_per_block`` slots of the KV storage: [block_id * T, (block_id + 1) * T).

    A block is *empty* (nobody references it, nothing of use in it), *referenced* (in the tables of
    ``ref_count`` requests) or *cached* (nobody references it, the radix tree knows its content).
    Only ``BlockPool`` changes it.
    """

    __slots__ = ("block_id", "ref_count", "node")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.node: Node | None = None
        """What is written in the block; None while it is not committed."""

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"


class BlockKey(NamedTuple):
    """Names a full block by its tokens and by everything before them."""

    digest: bytes
    """32 bytes: SHA-256 over the digest of the block before it and ``token_ids``."""
    token_ids: bytes
    """Little-endian int32[tokens_per_block]; compared on a hit, so a collision is a miss."""


def root_digest(cache_salt: str | None) -> bytes:
    """What the first block's digest is chained to: one value for each salt, and one for none."""
    if cache_salt is None:
        return hashlib.sha256(b"no salt").digest()
    # A salt from a client's JSON may hold lone surrogates, which plain UTF-8 refuses to encode.
    return hashlib.sha256(b"salt:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent_digest: bytes, token_ids: npt.NDArray[np.int32]) -> BlockKey:
    """The key of the block that holds ``token_ids`` (int32[tokens_per_block])."""
    content = token_ids.astype("<i4", copy=False).tobytes()
    return BlockKey(hashlib.sha256(parent_digest + content).digest(), content)
