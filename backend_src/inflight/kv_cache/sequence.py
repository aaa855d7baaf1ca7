"""KvSequence: one request's block table, its three lengths and its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.block import Block, BlockKey, block_key, root_digest

_FIRST_TABLE_SIZE = 16


class RequestCounts(NamedTuple):
    """Blocks of one request since it was opened, pauses included."""

    alloc_total: int
    """Taken from the pool."""
    alloc_new: int
    """Those of ``alloc_total`` that were empty; for the others a cached block was evicted."""
    reused: int
    """Taken from the tree; not part of ``alloc_total``."""
    missed: int
    """Looked up for a start (``match_prefix``) and not reused."""


class KvSequence:
    """The blocks of one open request, in the order of its tokens.

    Three lengths, in tokens::

        num_committed_tokens <= history_length <= capacity
              |                       |              |
              known to the tree       KV is written  slots in held blocks

    Only ``KvCacheManager`` changes it.
    """

    __slots__ = (
        "request_id",
        "tokens_per_block",
        "history_length",
        "num_committed_blocks",
        "num_sought_blocks",
        "num_allocated",
        "num_allocated_empty",
        "num_reused",
        "num_missed",
        "_blocks",
        "_table",
        "_table_view",
        "_root_digest",
        "_keys",
    )

    def __init__(self, request_id: int, cache_salt: str | None, tokens_per_block: int) -> None:
        self.request_id = request_id
        self.tokens_per_block = tokens_per_block
        self.history_length = 0
        self.num_committed_blocks = 0
        self.num_sought_blocks = 0
        """Blocks that the latest lookup asked for: what is missed if nothing of it is reused."""
        self.num_allocated = 0
        self.num_allocated_empty = 0
        self.num_reused = 0
        self.num_missed = 0
        self._blocks: list[Block] = []
        self._set_table(np.empty(_FIRST_TABLE_SIZE, dtype=np.int32))
        self._root_digest = root_digest(cache_salt)
        self._keys: list[BlockKey] = []

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_committed_tokens(self) -> int:
        return self.num_committed_blocks * self.tokens_per_block

    @property
    def capacity(self) -> int:
        return len(self._blocks) * self.tokens_per_block

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """Ids of the held blocks, int32[num_blocks]: a read-only view of the one table."""
        return self._table_view[: len(self._blocks)]

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(
            self.num_allocated, self.num_allocated_empty, self.num_reused, self.num_missed
        )

    @property
    def known_keys(self) -> Sequence[BlockKey]:
        """The keys computed so far."""
        return self._keys

    def keys(self, token_ids: npt.NDArray[np.int32], first: int, end: int) -> Iterator[BlockKey]:
        """Keys of blocks [first, end), computed as they are asked for, each one once.

        ``token_ids``: int32[n], n >= end * tokens_per_block, all from the start. They may only
        grow from call to call, also over a pause: keys of the tokens before are kept.
        """
        for index in range(first, end):
            while len(self._keys) <= index:
                self._append_key(token_ids)
            yield self._keys[index]

    def _append_key(self, token_ids: npt.NDArray[np.int32]) -> None:
        start = len(self._keys) * self.tokens_per_block
        parent = self._keys[-1].digest if self._keys else self._root_digest
        self._keys.append(block_key(parent, token_ids[start : start + self.tokens_per_block]))

    def attach(self, blocks: Sequence[Block]) -> None:
        """Starts with reused blocks: their tokens are written and committed."""
        assert not self._blocks and self.history_length == 0
        for block in blocks:
            self.append(block)
        self.num_committed_blocks = len(blocks)
        self.history_length = self.num_committed_tokens

    def append(self, block: Block) -> None:
        """Adds ``tokens_per_block`` slots at the end."""
        held = len(self._blocks)
        if held == len(self._table):
            self._set_table(np.concatenate([self._table, np.empty_like(self._table)]))
        self._table[held] = block.block_id
        self._blocks.append(block)

    def _set_table(self, table: npt.NDArray[np.int32]) -> None:
        self._table = table
        self._table_view = table.view()
        self._table_view.flags.writeable = False

    def clear(self) -> list[Block]:
        """Forgets its blocks and lengths, and returns the blocks; keys and counts are kept."""
        blocks, self._blocks = self._blocks, []
        self.history_length = 0
        self.num_committed_blocks = 0
        return blocks
