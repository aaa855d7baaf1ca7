"""Reservation: one call of ``KvCacheManager.reserve``, decided as a whole and then done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.errors import OutOfBlocksError
from inflight.kv_cache.block import Block
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.identity import token_bytes
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.prefix import Prefixes, ReusablePrefix
from inflight.kv_cache.radix_tree import Node, RadixTree
from inflight.kv_cache.sequence import KvSequence


class BlockCopies(NamedTuple):
    """Whole blocks to copy before the forward pass. No block is both a source and a target."""

    source_ids: npt.NDArray[np.int32]
    """int32[n]."""
    target_ids: npt.NDArray[np.int32]
    """int32[n], all different."""
    further: Sequence[BlockCopies] = ()
    """Those of the second pool and the ones after it, where there are several."""


_NO_IDS = np.empty(0, dtype=np.int32)
NO_COPIES = BlockCopies(_NO_IDS, _NO_IDS)


class _Growth:
    """What is decided for one sequence."""

    __slots__ = ("sequence", "prefix", "part", "part_tokens", "copies_own", "num_new", "is_taker")

    def __init__(self, sequence: KvSequence, num_new: int) -> None:
        self.sequence = sequence
        self.num_new = num_new
        """Blocks it takes from the free ones."""
        self.prefix = ReusablePrefix(0, ())
        """Reused whole."""
        self.part: Node | None = None
        """Reused in part: its block is copied into the first new one, or taken over as it."""
        self.part_tokens = 0
        self.copies_own: int | None = None
        """Index of a held block that is written next and held by others as well."""
        self.is_taker = False
        """``part``'s block becomes its own, and no copy is made."""


class Reservation:
    """``add`` decides and changes nothing; after ``check_fit`` nothing can fail any more.

    Of a block that is reused in part a request gets a copy. Its source is referenced until the
    copy is known to be made (``commit``). That never makes a plan need more blocks than it was
    counted for: where no other block is left, the last request that wants a copy of a source that
    nobody else holds takes the source itself over.
    """

    def __init__(
        self, pool: BlockPool, tree: RadixTree, prefixes: Prefixes, *, prefer_take_over: bool
    ) -> None:
        """``prefer_take_over``: also where other blocks are left; only parts that can be taken over
        are reused then."""
        self._pool = pool
        self._tree = tree
        self._prefixes = prefixes
        self._prefer_take_over = prefer_take_over
        self.num_reused = 0
        self.num_missed = 0
        self._growths: list[_Growth] = []
        self._num_staying: dict[Block, int] = {}
        """Of a shared block that requests of this plan write next: holders that keep it."""
        self._copies: list[tuple[Block, Block]] = []

    def add(self, sequence: KvSequence, extent: KvExtent) -> None:
        """Raises OutOfBlocksError when what the extent reuses is no longer cached."""
        num_blocks = -(-extent.end // sequence.tokens_per_block)
        growth = _Growth(sequence, num_blocks - sequence.num_blocks)
        if sequence.num_blocks > 0:
            self._decide_own_copy(growth, extent.start // sequence.tokens_per_block)
        elif extent.start > 0:
            self._decide_reuse(growth, extent)
        self._growths.append(growth)

    def _decide_own_copy(self, growth: _Growth, index: int) -> None:
        """Of several that write the same block, all but the last holder get a copy."""
        if index >= growth.sequence.num_blocks:
            return
        block = growth.sequence.blocks[index]
        num_staying = self._num_staying.get(block, block.ref_count)
        if num_staying > 1:
            self._num_staying[block] = num_staying - 1
            growth.copies_own = index
            growth.num_new += 1

    def _decide_reuse(self, growth: _Growth, extent: KvExtent) -> None:
        sequence, token_ids = growth.sequence, extent.token_ids
        num_whole, growth.part_tokens = divmod(extent.start, sequence.tokens_per_block)
        assert extent.start < extent.end
        growth.prefix = self._prefixes.find(sequence, token_ids, num_whole)
        if growth.prefix.num_blocks < num_whole:
            raise OutOfBlocksError(
                f"request {extent.request_id} was to reuse {num_whole} blocks, "
                f"{growth.prefix.num_blocks} are cached"
            )
        growth.num_new -= num_whole
        if growth.part_tokens:
            parent = self._prefixes.parent_after(sequence, growth.prefix)
            growth.prefix = self._prefixes.seen_from(growth.prefix, extent.start)
            tokens = token_bytes(token_ids[num_whole * sequence.tokens_per_block : extent.start])
            growth.part = self._tree.find_part(parent, tokens, only_unused=self._prefer_take_over)
            if growth.part is None:
                raise OutOfBlocksError(
                    f"request {extent.request_id} was to reuse {growth.part_tokens} tokens of a "
                    "block that is not cached"
                )

    def check_fit(self) -> None:
        """Raises OutOfBlocksError. Cached blocks that the plan reuses stop being free, each once
        however many share it."""
        num_new = sum(growth.num_new for growth in self._growths)
        revived = {
            node.block
            for growth in self._growths
            for node in growth.prefix.nodes
            if node.block.ref_count == 0
        }
        if num_new + len(revived) > self._pool.num_free:
            raise OutOfBlocksError(
                f"the plan needs {num_new} new and {len(revived)} cached KV blocks, "
                f"{self._pool.num_free} are free"
            )

    def carry_out(self) -> BlockCopies:
        """A new block may evict any cached one, so all that is reused is referenced first."""
        assert len({growth.sequence for growth in self._growths}) == len(self._growths)
        for growth in self._growths:
            self._attach_prefix(growth)
        if any(growth.part is not None for growth in self._growths):
            self._choose_takers()
            self._hold_parts()
        taken = [self._take_blocks(growth) for growth in self._growths]
        for growth, blocks in zip(self._growths, taken, strict=True):
            self._append_blocks(growth, blocks)
        self._pool.tell_removed()
        if not self._copies:
            return NO_COPIES
        ids = np.array([[s.block_id, t.block_id] for s, t in self._copies], dtype=np.int32)
        return BlockCopies(ids[:, 0].copy(), ids[:, 1].copy())

    def _attach_prefix(self, growth: _Growth) -> None:
        sequence = growth.sequence
        if sequence.num_blocks > 0:
            return
        num_blocks, nodes = growth.prefix
        num_passed = growth.prefix.num_passed
        for index, node in enumerate(nodes, num_passed):
            self._pool.reference(node.block)
            node.block.retention = sequence.retention_of(index) or node.block.retention
        # Any id of the pool will do for blocks that nobody looks at.
        passed = [self._pool.blocks[0]] * num_passed
        sequence.attach([node.block for node in nodes], passed)
        sequence.history_length += growth.part_tokens
        num_reused = num_blocks + (growth.part is not None)
        num_missed = max(0, sequence.num_sought_blocks - num_reused)
        sequence.num_reused += num_reused
        sequence.num_missed += num_missed
        self.num_reused += num_reused
        self.num_missed += num_missed

    def _choose_takers(self) -> None:
        """Takes over as many unused sources as blocks would be missing if all stayed referenced.

        Then every other cached block is evicted before a source is taken over, so it has become a
        leaf: what comes after it is cached, and no source itself, as that would hold it.
        """
        last_user = {
            growth.part.block: growth
            for growth in self._growths
            if growth.part is not None and growth.part.block.ref_count == 0
        }
        num_taken = len(last_user)
        if not self._prefer_take_over:
            num_new = sum(growth.num_new for growth in self._growths)
            num_taken = max(0, num_taken - (self._pool.num_free - num_new))
        for growth in list(last_user.values())[:num_taken]:
            growth.is_taker = True

    def _hold_parts(self) -> None:
        for growth in self._growths:
            if growth.part is not None:
                self._pool.reference(growth.part.block)
                if not growth.is_taker:
                    growth.sequence.copy_source = growth.part.block

    def _take_blocks(self, growth: _Growth) -> list[Block]:
        sequence, count = growth.sequence, growth.num_new - growth.is_taker
        sequence.num_allocated += growth.num_new
        sequence.num_allocated_empty += min(count, self._pool.num_empty)
        return [self._pool.allocate() for _ in range(count)]

    def _append_blocks(self, growth: _Growth, blocks: list[Block]) -> None:
        sequence = growth.sequence
        if growth.copies_own is not None:
            shared = sequence.replace(growth.copies_own, blocks[0])
            self._copies.append((shared, blocks.pop(0)))
            self._pool.release(shared)
            sequence.has_pending_copy = True
        if growth.part is not None:
            sequence.has_pending_copy = True
            source = growth.part.block
            if growth.is_taker:
                self._pool.take_over(source)
                sequence.append(source)
            else:
                self._copies.append((source, blocks[0]))
        for block in blocks:
            sequence.append(block)
