"""KvCacheManager: which request holds which KV blocks, and which prefixes can be reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.api.kv import PrefixMatch
from inflight.api.stats import KvCacheStats
from inflight.errors import IntegrityError, OutOfBlocksError
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.integrity import find_faults
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import Node, RadixTree
from inflight.kv_cache.sequence import KvSequence, RequestCounts

_MAX_REPORTED_FAULTS = 5


class _Growth(NamedTuple):
    """What ``reserve`` has decided for one sequence."""

    sequence: KvSequence
    prefix: Sequence[Node]
    """Reused; empty unless the sequence starts."""
    num_new_blocks: int


class KvCacheManager:
    """The books of the paged KV cache; the KV itself lies with the model runner.

    An open request that holds blocks is *started*; ``reserve`` starts it, ``release`` undoes that.
    In every iteration ``reserve`` makes room, the forward pass writes, ``commit`` says that it did.
    Blocks that were reserved and not committed never become reusable. Not thread-safe.

    It satisfies ``scheduler.ports.KvCapacity``. Only ``reserve`` lowers ``num_free_blocks``.
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, *, enable_block_reuse: bool = True
    ) -> None:
        """Without ``enable_block_reuse`` nothing is ever shared or kept."""
        if num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"{num_blocks} KV blocks of {tokens_per_block} tokens: must be >= 1")
        self._num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._enable_block_reuse = enable_block_reuse
        self._tree = RadixTree()
        self._pool = BlockPool(num_blocks, self._tree)
        self._sequences: dict[int, KvSequence] = {}
        self._num_reused = 0
        self._num_missed = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def tokens_per_block(self) -> int:
        return self._tokens_per_block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references: empty ones, and cached ones that may be evicted."""
        return self._pool.num_free

    def num_held_blocks(self, request_id: int) -> int:
        """Blocks in the request's table; 0 unless it is started."""
        return self._sequences[request_id].num_blocks

    def num_releasable_blocks(self, request_id: int) -> int:
        """By how much ``num_free_blocks`` grows if this request is released now; O(held)."""
        return sum(block.ref_count == 1 for block in self._sequences[request_id].blocks)

    def block_table(self, request_id: int) -> npt.NDArray[np.int32]:
        """Ids of the held blocks in the order of the tokens, int32[held], read-only.

        A view of the request's one table: stale after the next ``reserve`` or ``release``.
        """
        return self._sequences[request_id].table

    def open(self, request_id: int, cache_salt: str | None) -> None:
        """Makes a request known. It reuses only blocks of requests with an equal salt."""
        assert request_id not in self._sequences, f"request {request_id} is already open"
        self._sequences[request_id] = KvSequence(request_id, cache_salt, self._tokens_per_block)

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        """How much of ``token_ids`` (int32[n], n >= 1) an open request could reuse now.

        At most (n - 1) // tokens_per_block blocks, so that a token is left to compute. Keys are
        computed once a request: its tokens may only grow from call to call. Changes nothing but
        what ``request_counts`` will call missed.
        """
        if not self._enable_block_reuse:
            return PrefixMatch(0, 0)
        sequence = self._sequences[request_id]
        most = (len(token_ids) - 1) // self._tokens_per_block
        sequence.num_sought_blocks = most
        nodes = self._tree.match(sequence.keys(token_ids, 0, most))
        num_referenced = sum(node.block.ref_count > 0 for node in nodes)
        return PrefixMatch(len(nodes) * self._tokens_per_block, num_referenced)

    def reserve(self, extents: Iterable[KvExtent]) -> None:
        """Makes every request hold slots for all tokens of its extent; all or nothing.

        A request that is not started reuses [0, extent.start), which must be whole blocks. Raises
        OutOfBlocksError, with nothing changed, when there are too few blocks or when a prefix is
        no longer cached. One extent a request.
        """
        growths: list[_Growth] = []
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            if sequence.capacity < extent.end:
                growths.append(self._decide_growth(sequence, extent))
        if not growths:
            return
        assert len({growth.sequence for growth in growths}) == len(growths)
        self._check_fit(growths)
        # A new block may evict any cached one, so all that the plan reuses is referenced first.
        for growth in growths:
            if growth.sequence.num_blocks == 0:
                self._start(growth.sequence, growth.prefix)
        for growth in growths:
            self._grow(growth.sequence, growth.num_new_blocks)

    def _decide_growth(self, sequence: KvSequence, extent: KvExtent) -> _Growth:
        num_blocks = -(-extent.end // self._tokens_per_block)
        if sequence.num_blocks > 0 or extent.start == 0:
            return _Growth(sequence, (), num_blocks - sequence.num_blocks)
        num_reused, rest = divmod(extent.start, self._tokens_per_block)
        assert rest == 0 and extent.start < extent.end
        nodes = self._tree.match(sequence.keys(extent.token_ids, 0, num_reused))
        if len(nodes) < num_reused:
            raise OutOfBlocksError(
                f"request {extent.request_id} was to reuse {num_reused} blocks, "
                f"{len(nodes)} are cached"
            )
        return _Growth(sequence, nodes, num_blocks - num_reused)

    def _check_fit(self, growths: Sequence[_Growth]) -> None:
        """Cached blocks that the plan reuses stop being free, each once however many share it."""
        num_new = sum(growth.num_new_blocks for growth in growths)
        revived = {
            node.block for growth in growths for node in growth.prefix if node.block.ref_count == 0
        }
        if num_new + len(revived) > self._pool.num_free:
            raise OutOfBlocksError(
                f"the plan needs {num_new} new and {len(revived)} cached KV blocks, "
                f"{self._pool.num_free} are free"
            )

    def _start(self, sequence: KvSequence, prefix: Sequence[Node]) -> None:
        for node in prefix:
            self._pool.reference(node.block)
        sequence.attach([node.block for node in prefix])
        num_missed = max(0, sequence.num_sought_blocks - len(prefix))
        sequence.num_reused += len(prefix)
        sequence.num_missed += num_missed
        self._num_reused += len(prefix)
        self._num_missed += num_missed

    def _grow(self, sequence: KvSequence, num_new_blocks: int) -> None:
        sequence.num_allocated += num_new_blocks
        sequence.num_allocated_empty += min(num_new_blocks, self._pool.num_empty)
        for _ in range(num_new_blocks):
            sequence.append(self._pool.allocate())

    def commit(self, extents: Iterable[KvExtent]) -> None:
        """The KV of each extent is written: blocks that became full become reusable at once.

        Where an equal block is in the tree already and held by somebody, this request's own stays
        private; its table never changes.
        """
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            assert extent.start == sequence.history_length
            assert extent.start < extent.end <= sequence.capacity
            sequence.history_length = extent.end
            num_full = extent.end // self._tokens_per_block
            if num_full > sequence.num_committed_blocks and self._enable_block_reuse:
                self._commit_blocks(sequence, extent.token_ids, num_full)

    def _commit_blocks(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], num_full: int
    ) -> None:
        first = sequence.num_committed_blocks
        parent: Node | RadixTree = self._tree
        if first > 0:
            last_node = sequence.blocks[first - 1].node
            assert last_node is not None
            parent = last_node
        keys = sequence.keys(token_ids, first, num_full)
        for block, key in zip(sequence.blocks[first:num_full], keys, strict=True):
            if not self._pool.commit(block, parent, key):
                return  # a collision: what comes after it has no place in the tree either
            assert block.node is not None
            parent = block.node
            sequence.num_committed_blocks += 1

    def release(self, request_id: int) -> None:
        """Pauses a request: it stays open and holds nothing. Committed blocks stay cached."""
        # Tail first: eviction then meets a prefix's last block before its first.
        for block in reversed(self._sequences[request_id].clear()):
            self._pool.release(block)

    def close(self, request_id: int) -> None:
        """Ends a request: releases its blocks and forgets it."""
        assert request_id in self._sequences, f"request {request_id} is not open"
        self.release(request_id)
        del self._sequences[request_id]

    def request_counts(self, request_id: int) -> RequestCounts:
        """What an open request took so far: allocated, reused and missed blocks."""
        return self._sequences[request_id].counts

    def stats(self) -> KvCacheStats:
        """The pool now, and counts since the start. Reused blocks are not among the allocated."""
        pool = self._pool
        return KvCacheStats(
            max_num_blocks=self._num_blocks,
            free_num_blocks=pool.num_free,
            used_num_blocks=self._num_blocks - pool.num_free,
            tokens_per_block=self._tokens_per_block,
            alloc_total_blocks=pool.num_allocated,
            alloc_new_blocks=pool.num_allocated - pool.num_evicted,
            reused_blocks=self._num_reused,
            missed_blocks=self._num_missed,
            evicted_blocks=pool.num_evicted,
        )

    def check_integrity(self) -> None:
        """Counts everything again, O(num_blocks); raises IntegrityError that says what is wrong."""
        faults = find_faults(self._pool, self._tree, self._sequences.values())
        reported = list(islice(faults, _MAX_REPORTED_FAULTS))
        if reported:
            raise IntegrityError("; ".join(reported))
