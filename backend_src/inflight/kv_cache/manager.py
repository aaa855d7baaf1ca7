"""KvCacheManager: which request holds which KV blocks, and which prefixes can be reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from inflight.api.executor_config import KvCacheConfig
from inflight.api.kv import PrefixMatch
from inflight.api.stats import KvCacheStats
from inflight.errors import IntegrityError
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.identity import BlockKey, PrefixIdentity, token_bytes
from inflight.kv_cache.insertion import WriteBlocks, insert_cached
from inflight.kv_cache.integrity import find_faults
from inflight.kv_cache.observer import BlockObserver
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import Node, RadixTree, Root
from inflight.kv_cache.reservation import NO_COPIES, BlockCopies, Reservation
from inflight.kv_cache.retention import BlockRetention
from inflight.kv_cache.sequence import KvSequence, RequestCounts

_MAX_REPORTED_FAULTS = 5


class KvCacheManager:
    """The books of the paged KV cache; the KV itself lies with the model runner.

    An open request that holds blocks is *started*; ``reserve`` starts it, ``release`` undoes that.
    In every iteration ``reserve`` makes room, the copies it returns are made, the forward pass
    writes, and ``commit`` says that all this was done. Blocks that were reserved and not committed
    never become reusable. Not thread-safe.

    It satisfies ``scheduler.ports.KvCapacity``. Only ``reserve`` lowers ``num_free_blocks``.
    """

    def __init__(
        self,
        num_blocks: int,
        config: KvCacheConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[BlockObserver] = (),
    ) -> None:
        """``num_blocks``: what the ``config`` came to. ``clock``: seconds, for retention."""
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} KV blocks: must be >= 1")
        self._num_blocks = num_blocks
        self._tokens_per_block = config.tokens_per_block
        self._reuses = config.enable_block_reuse
        self._reuses_parts = config.enable_block_reuse and config.enable_partial_reuse
        self._copies_parts = config.copy_on_partial_reuse
        self._tree = RadixTree(config.tokens_per_block)
        self._pool = BlockPool(num_blocks, self._tree, clock, observers)
        self._sequences: dict[int, KvSequence] = {}
        self._num_reused = self._num_missed = 0

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

    def open(
        self,
        request_id: int,
        identity: PrefixIdentity | None = None,
        retention: BlockRetention | None = None,
    ) -> None:
        """Makes a request known. It reuses only blocks of requests with an equal identity."""
        assert request_id not in self._sequences, f"request {request_id} is already open"
        self._sequences[request_id] = KvSequence(
            request_id, identity or PrefixIdentity(), retention, self._tokens_per_block
        )

    def fork(self, request_id: int, child_ids: Iterable[int]) -> None:
        """Opens further requests with the tokens of an open one, in the same blocks.

        For beams and for several sequences of one prompt; it shares also where block reuse is off.
        Full blocks stay shared. The last block, where it is not full, is shared until its holders
        write on: ``reserve`` then gives each a copy, and the last one the block itself
        (``num_new_blocks`` counts it). Call it between ``commit`` and the next ``reserve``.
        """
        parent = self._sequences[request_id]
        num_written = -(-parent.history_length // self._tokens_per_block)
        assert parent.num_blocks == num_written, "a fork in the middle of an iteration"
        for child_id in child_ids:
            assert child_id not in self._sequences, f"request {child_id} is already open"
            self._sequences[child_id] = parent.fork(child_id)
            for block in parent.blocks:
                self._pool.share(block)

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        """How much of ``token_ids`` (int32[n], n >= 1) an open request could reuse now.

        At most n - 1 tokens, so that one is left to compute: whole blocks, then a beginning of one.
        Keys are computed once a request: its tokens may only grow from call to call. Changes
        nothing but what ``request_counts`` will call missed.
        """
        if not self._reuses:
            return PrefixMatch(0, 0)
        sequence = self._sequences[request_id]
        sequence.num_sought_blocks = -(-len(token_ids) // self._tokens_per_block)
        most = (len(token_ids) - 1) // self._tokens_per_block
        root = self._tree.root(sequence.root_digest)
        nodes = self._tree.match(root, sequence.keys(token_ids, 0, most))
        num_tokens = len(nodes) * self._tokens_per_block
        if self._reuses_parts:
            parent = nodes[-1] if nodes else root
            num_tokens += self._num_part_tokens(sequence, parent, token_ids, num_tokens)
        return PrefixMatch(
            num_tokens,
            sum(node.block.ref_count > 0 for node in nodes),
            sequence.known_keys[len(nodes)].digest if len(nodes) < most else None,
        )

    def _num_part_tokens(
        self,
        sequence: KvSequence,
        parent: Node | Root,
        token_ids: npt.NDArray[np.int32],
        start: int,
    ) -> int:
        """How many tokens from ``start`` on could be taken from a block that begins with them."""
        end = min(len(token_ids), start + self._tokens_per_block) - 1
        if not parent.parts or sequence.identity.extra_bytes(start, end + 1):
            return 0
        tokens = token_bytes(token_ids[start:end])
        return self._tree.longest_part(parent, tokens, only_unused=not self._copies_parts)

    def missing_blocks(
        self, request_id: int, token_ids: npt.NDArray[np.int32]
    ) -> Sequence[BlockKey]:
        """The whole blocks that ``match_prefix`` would offer as well if they were in the cache, in
        order: what other tiers may be asked for."""
        if not self._reuses:
            return ()
        sequence = self._sequences[request_id]
        most = (len(token_ids) - 1) // self._tokens_per_block
        keys = list(sequence.keys(token_ids, 0, most))
        return keys[len(self._tree.match(self._tree.root(sequence.root_digest), keys)) :]

    def onboard(
        self, request_id: int, token_ids: npt.NDArray[np.int32], num_blocks: int, write: WriteBlocks
    ) -> int:
        """Puts the first ``num_blocks`` of ``missing_blocks`` into the cache, held by nobody.

        Returns how many there was room for. ``write`` fills them; see ``insert_cached``. Call it
        between two iterations.
        """
        sequence = self._sequences[request_id]
        missing = self.missing_blocks(request_id, token_ids)[:num_blocks]
        root = self._tree.root(sequence.root_digest)
        nodes = self._tree.match(root, sequence.known_keys)
        keys = [(k, sequence.retention_of(i)) for i, k in enumerate(missing, len(nodes))]
        return insert_cached(self._pool, (root, nodes), keys, write) if keys else 0

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        """The name of the block that a started request makes reusable next, if ``token_ids``
        (int32[n], all it has) fill it; see ``PrefixMatch.next_block``."""
        sequence = self._sequences[request_id]
        index = sequence.num_committed_blocks
        if not self._reuses or len(token_ids) < (index + 1) * self._tokens_per_block:
            return None
        return next(sequence.keys(token_ids, index, index + 1)).digest

    def num_new_blocks(self, request_id: int, end: int) -> int:
        """Blocks that ``reserve`` takes from the free ones for a started request to write up to
        token ``end`` (more than are written), if nobody else writes; O(1)."""
        sequence = self._sequences[request_id]
        index = sequence.history_length // self._tokens_per_block
        is_shared = index < sequence.num_blocks and sequence.blocks[index].ref_count > 1
        return -(-end // self._tokens_per_block) - sequence.num_blocks + is_shared

    def reserve(self, extents: Iterable[KvExtent]) -> BlockCopies:
        """Makes every request hold slots for all tokens of its extent; all or nothing.

        A request that is not started reuses [0, extent.start): all that ``match_prefix`` offered,
        or fewer whole blocks. The copies that are returned must be made before the forward pass; a
        request whose copies were not made must be released or closed. Raises OutOfBlocksError, with
        nothing changed, when there are too few blocks or when a prefix is no longer cached. One
        extent a request.
        """
        growing = []
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            if sequence.capacity < extent.end or sequence.is_forked:
                growing.append((sequence, extent))
        if not growing:
            return NO_COPIES
        reservation = Reservation(self._pool, self._tree, prefer_take_over=not self._copies_parts)
        for sequence, extent in growing:
            reservation.add(sequence, extent)
        reservation.check_fit()
        copies = reservation.carry_out()
        self._num_reused += reservation.num_reused
        self._num_missed += reservation.num_missed
        return copies

    def commit(self, extents: Iterable[KvExtent]) -> None:
        """The KV of each extent is written: blocks that became full become reusable at once.

        Where an equal block is in the tree already and held by somebody, this request's own stays
        private; its table never changes.
        """
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            assert extent.start == sequence.history_length
            assert extent.start < extent.end <= sequence.capacity
            if sequence.has_pending_copy:
                self._settle_copy(sequence)
            sequence.history_length = extent.end
            sequence.written_ids = extent.token_ids
            num_full = extent.end // self._tokens_per_block
            if num_full > sequence.num_committed_blocks and self._reuses:
                self._commit_blocks(sequence, extent.token_ids, num_full)

    def _settle_copy(self, sequence: KvSequence) -> None:
        sequence.has_pending_copy = False
        source, sequence.copy_source = sequence.copy_source, None
        if source is not None:
            self._pool.release(source)

    def _commit_blocks(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], num_full: int
    ) -> None:
        first = sequence.num_committed_blocks
        parent = self._last_committed(sequence)
        keys = sequence.keys(token_ids, first, num_full)
        for index, key in enumerate(keys, first):
            block = sequence.blocks[index]
            # A fork may have committed the block that both hold.
            if block.node is None and not self._pool.commit(
                block, parent, key, sequence.retention_of(index)
            ):
                return  # a collision: what comes after it has no place in the tree either
            assert block.node is not None
            parent = block.node
            sequence.num_committed_blocks += 1

    def _last_committed(self, sequence: KvSequence) -> Node | Root:
        if sequence.num_committed_blocks == 0:
            return self._tree.root(sequence.root_digest)
        node = sequence.blocks[sequence.num_committed_blocks - 1].node
        assert node is not None
        return node

    def release(self, request_id: int) -> None:
        """Pauses a request: it stays open and holds nothing. What it wrote stays cached, full
        blocks and, with partial reuse, the beginning of the last one."""
        sequence = self._sequences[request_id]
        if not sequence.has_pending_copy and self._reuses_parts:
            self._commit_part(sequence)
        self._settle_copy(sequence)
        # Tail first: eviction then meets a prefix's last block before its first.
        for block in reversed(sequence.clear()):
            self._pool.release(block)

    def _commit_part(self, sequence: KvSequence) -> None:
        num_full, rest = divmod(sequence.history_length, self._tokens_per_block)
        if rest == 0 or sequence.written_ids is None or num_full > sequence.num_committed_blocks:
            return
        block = sequence.blocks[num_full]
        if block.ref_count > 1:
            return  # a fork goes on writing it
        key = sequence.part_key(sequence.written_ids)
        if not key.extra_ids:
            retention = sequence.retention_of(num_full)
            self._pool.commit_part(block, self._last_committed(sequence), key, retention)

    def close(self, request_id: int) -> None:
        """Ends a request: releases its blocks and forgets it."""
        assert request_id in self._sequences, f"request {request_id} is not open"
        self.release(request_id)
        del self._sequences[request_id]

    def cached_blocks(self) -> Iterator[tuple[int, BlockKey]]:
        """Ids and keys of ``BlockPool.most_valuable_first``; nothing may change meanwhile."""
        return ((node.block.block_id, node.key) for node in self._pool.most_valuable_first())

    def request_counts(self, request_id: int) -> RequestCounts:
        """What an open request took so far: allocated, reused and missed blocks."""
        return self._sequences[request_id].counts

    def stats(self) -> KvCacheStats:
        """The pool now, and counts since the start."""
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
        if reported := list(islice(faults, _MAX_REPORTED_FAULTS)):
            raise IntegrityError("; ".join(reported))
