"""KvSequence: one request's block table, its three lengths and its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.block import Block
from inflight.kv_cache.identity import BlockKey, PrefixIdentity, block_key
from inflight.kv_cache.retention import BlockRetention, Retention

_FIRST_TABLE_SIZE = 16


class RequestCounts(NamedTuple):
    """Blocks of one request since it was opened, pauses included."""

    alloc_total: int
    """Taken from the pool."""
    alloc_new: int
    """Those of ``alloc_total`` that were empty; for the others a cached block was evicted."""
    reused: int
    """Found in the tree, whole or in part. A part is copied into a block of ``alloc_total``, so it
    counts in both."""
    missed: int
    """Of what a start looked up (``match_prefix``), its last block counted too: not reused."""


class KvSequence:
    """The blocks of one open request, in the order of its tokens.

    Three lengths, in tokens::

        num_committed_tokens <= history_length <= capacity
              |                       |              |
              known to the tree       KV is written  slots in held blocks

    Only the modules of this room change it.
    """

    __slots__ = (
        "request_id",
        "identity",
        "retention",
        "tokens_per_block",
        "history_length",
        "num_committed_blocks",
        "num_sought_blocks",
        "num_allocated",
        "num_allocated_empty",
        "num_reused",
        "num_missed",
        "written_ids",
        "copy_source",
        "has_pending_copy",
        "is_forked",
        "num_passed",
        "_blocks",
        "_table",
        "_table_view",
        "_root_digest",
        "_keys",
    )

    def __init__(
        self,
        request_id: int,
        identity: PrefixIdentity,
        retention: BlockRetention | None,
        tokens_per_block: int,
        keys: list[BlockKey] | None = None,
    ) -> None:
        """``keys``: where keys of full blocks are kept. The sequences of one request in several
        pools share it, so that each key is computed once."""
        self.request_id = request_id
        self.identity = identity
        self.retention = retention
        self.tokens_per_block = tokens_per_block
        self.is_forked = False
        """Others may hold the block that it writes next, as it was or has a fork."""
        self.num_sought_blocks = 0
        """Blocks that the latest lookup asked for: what is missed if nothing of it is reused."""
        self.num_allocated = 0
        self.num_allocated_empty = 0
        self.num_reused = 0
        self.num_missed = 0
        self._set_table(np.empty(_FIRST_TABLE_SIZE, dtype=np.int32))
        self._root_digest = identity.root_digest()
        self._keys: list[BlockKey] = [] if keys is None else keys
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self._blocks: list[Block] = []
        self.num_passed = 0
        """Blocks at the beginning that the window has passed: their places in the table are kept,
        and what stands there is not held. 0 without a window."""
        self.history_length = 0
        self.num_committed_blocks = 0
        self.written_ids: npt.NDArray[np.int32] | None = None
        """int32[history_length], the tokens of the latest commit; None before the first one."""
        self.copy_source: Block | None = None
        """Referenced until the copy that the latest ``reserve`` asked for is known to be made."""
        self.has_pending_copy = False
        """The block that holds token ``history_length`` has its beginning only after a copy that
        the latest ``reserve`` asked for; ``commit`` says that it was made."""

    @property
    def blocks(self) -> Sequence[Block]:
        """All places of the table, the passed ones included."""
        return self._blocks

    @property
    def held_blocks(self) -> Sequence[Block]:
        return self._blocks[self.num_passed :] if self.num_passed else self._blocks

    @property
    def num_blocks(self) -> int:
        """Places of the table; 0 unless the request is started."""
        return len(self._blocks)

    @property
    def num_held_blocks(self) -> int:
        return len(self._blocks) - self.num_passed

    @property
    def num_committed_tokens(self) -> int:
        return self.num_committed_blocks * self.tokens_per_block

    @property
    def capacity(self) -> int:
        return len(self._blocks) * self.tokens_per_block

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """Block ids in the order of the tokens, int32[num_blocks]: a read-only view of the one
        table. Those of passed blocks are ids of the pool, and somebody else's blocks."""
        return self._table_view[: len(self._blocks)]

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(
            self.num_allocated, self.num_allocated_empty, self.num_reused, self.num_missed
        )

    @property
    def root_digest(self) -> bytes:
        return self._root_digest

    @property
    def known_keys(self) -> Sequence[BlockKey]:
        """The keys of full blocks computed so far."""
        return self._keys

    def retention_of(self, index: int) -> Retention | None:
        """What the request says about its block ``index``."""
        if self.retention is None:
            return None
        return self.retention.of_block(index, self.tokens_per_block)

    def keys(self, token_ids: npt.NDArray[np.int32], first: int, end: int) -> Iterator[BlockKey]:
        """Keys of full blocks [first, end), computed as they are asked for, each one once.

        ``token_ids``: int32[n], n >= end * tokens_per_block, all from the start. They may only
        grow from call to call, also over a pause: keys of the tokens before are kept.
        """
        for index in range(first, end):
            while len(self._keys) <= index:
                self._keys.append(self._key(token_ids, len(self._keys)))
            yield self._keys[index]

    def part_key(self, token_ids: npt.NDArray[np.int32]) -> BlockKey:
        """The key of the block that holds the last of ``token_ids`` (int32[n]), as far as they go;
        the keys of all full blocks before it are known."""
        return self._key(token_ids, (len(token_ids) - 1) // self.tokens_per_block)

    def _key(self, token_ids: npt.NDArray[np.int32], index: int) -> BlockKey:
        start, end = index * self.tokens_per_block, (index + 1) * self.tokens_per_block
        parent = self._keys[index - 1].digest if index else self._root_digest
        return block_key(parent, token_ids[start:end], self.identity.extra_bytes(start, end))

    def attach(self, blocks: Sequence[Block], passed: Sequence[Block] = ()) -> None:
        """Starts with whole reused blocks: their tokens are written and committed. ``passed``: what
        stands in the places before them, not held."""
        assert not self._blocks and self.history_length == 0
        for block in (*passed, *blocks):
            self.append(block)
        self.num_passed = len(passed)
        self.num_committed_blocks = len(self._blocks)
        self.history_length = self.num_committed_tokens

    def pass_blocks(self, end: int) -> Sequence[Block]:
        """The window has passed the blocks before place ``end``: returns those held until now."""
        passed = self._blocks[self.num_passed : end]
        self.num_passed = max(self.num_passed, end)
        return passed

    def append(self, block: Block) -> None:
        """Adds ``tokens_per_block`` slots at the end."""
        held = len(self._blocks)
        if held == len(self._table):
            self._set_table(np.concatenate([self._table, np.empty_like(self._table)]))
        self._table[held] = block.block_id
        self._blocks.append(block)

    def replace(self, index: int, block: Block) -> Block:
        """Puts ``block`` in the place of the block at ``index``, and returns that one."""
        old, self._blocks[index] = self._blocks[index], block
        self._table[index] = block.block_id
        return old

    @property
    def writes_shared(self) -> bool:
        """Others hold the block that is written next, so that it has to be copied first."""
        if not self.is_forked:
            return False
        index = self.history_length // self.tokens_per_block
        return index < self.num_blocks and self._blocks[index].ref_count > 1

    def fork(self, request_id: int) -> KvSequence:
        """A sequence of the same tokens in the same blocks, which are thereby held once more."""
        assert not self.has_pending_copy
        self.is_forked = True
        other = KvSequence(request_id, self.identity, self.retention, self.tokens_per_block)
        for block in self._blocks:
            other.append(block)
        other.num_passed = self.num_passed
        other.is_forked = True
        other.history_length = self.history_length
        other.num_committed_blocks = self.num_committed_blocks
        other.written_ids = self.written_ids
        other._keys = self._keys[: self.history_length // self.tokens_per_block]
        return other

    def _set_table(self, table: npt.NDArray[np.int32]) -> None:
        self._table = table
        self._table_view = table.view()
        self._table_view.flags.writeable = False

    def clear(self) -> list[Block]:
        """Forgets its blocks and lengths, and returns those it held; keys and counts are kept."""
        blocks = list(self.held_blocks)
        self._hold_nothing()
        return blocks
