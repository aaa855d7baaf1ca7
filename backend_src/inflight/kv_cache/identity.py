"""PrefixIdentity: what besides its tokens makes a prefix what it is, and the names of blocks."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BYTES_PER_TOKEN = 4
"""Of ``BlockKey.token_ids``."""


class PrefixIdentity(NamedTuple):
    """Requests reuse each other's blocks only where all of this is equal."""

    cache_salt: str | None = None
    lora_task_id: int | None = None
    """0..2**64-1: the adapter that computed the KV; None = the model alone."""
    extra_ids: npt.NDArray[np.uint64] | None = None
    """uint64[n]: for each of the first n tokens what its KV depends on besides its id (the hash of
    an image, a row of a prompt table), 0 = nothing; 0 for all tokens after them. Blocks with extra
    ids are reused whole or not at all."""

    def root_digest(self) -> bytes:
        """What the digest of the first block is chained to, 32 bytes."""
        hasher = hashlib.sha256()
        for part in (self._salt_bytes(), self._lora_bytes()):
            hasher.update(b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little") + part)
        return hasher.digest()

    def extra_bytes(self, start: int, end: int) -> bytes:
        """The extra ids of tokens [start, end) as little-endian uint64; empty where all are 0."""
        if self.extra_ids is None:
            return b""
        stated = self.extra_ids[start:end]
        if not stated.any():
            return b""
        padded = np.zeros(end - start, dtype="<u8")
        padded[: len(stated)] = stated
        return padded.tobytes()

    def _salt_bytes(self) -> bytes | None:
        # A salt from a client's JSON may hold lone surrogates, which plain UTF-8 does not encode.
        salt = self.cache_salt
        return None if salt is None else salt.encode("utf-8", "surrogatepass")

    def _lora_bytes(self) -> bytes | None:
        task_id = self.lora_task_id
        return None if task_id is None else task_id.to_bytes(8, "little")


class BlockKey(NamedTuple):
    """Names the content of a block by its tokens and by everything before them."""

    digest: bytes
    """32 bytes: SHA-256 over ``parent_digest``, ``token_ids``, ``extra_ids``."""
    parent_digest: bytes
    """32 bytes: of the block before it; of the first one ``PrefixIdentity.root_digest``."""
    token_ids: bytes
    """Little-endian int32[n], n = tokens_per_block where the block is full. Compared on a hit, so a
    collision is a miss."""
    extra_ids: bytes = b""
    """``PrefixIdentity.extra_bytes``; compared on a hit."""


def token_bytes(token_ids: npt.NDArray[np.int32]) -> bytes:
    """int32[n] as little-endian bytes, 4 a token."""
    return token_ids.astype("<i4", copy=False).tobytes()


def block_key(
    parent_digest: bytes, token_ids: npt.NDArray[np.int32], extra_ids: bytes = b""
) -> BlockKey:
    """The key of ``token_ids`` (int32[n], 1 <= n <= tokens_per_block) after a parent."""
    return key_of_bytes(parent_digest, token_bytes(token_ids), extra_ids)


def key_of_bytes(parent_digest: bytes, token_ids: bytes, extra_ids: bytes) -> BlockKey:
    """``block_key`` of tokens that are bytes already."""
    digest = hashlib.sha256(parent_digest + token_ids + extra_ids).digest()
    return BlockKey(digest, parent_digest, token_ids, extra_ids)
