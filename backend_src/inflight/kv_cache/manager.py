"""KvCacheManager: which request holds which KV blocks, and which prefixes can be reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from inflight.api.executor_config import KvCacheConfig
from inflight.api.kv_pools import first_block_seen
from inflight.api.stats import KvCacheStats
from inflight.errors import IntegrityError
from inflight.kv_cache.committing import BlockCommitter
from inflight.kv_cache.extent import KvExtent
from inflight.kv_cache.identity import BlockKey, PrefixIdentity
from inflight.kv_cache.insertion import WriteBlocks, insert_cached
from inflight.kv_cache.integrity import PoolBooks, find_faults
from inflight.kv_cache.matching import PoolMatching
from inflight.kv_cache.observer import BlockObserver, ObservedPool
from inflight.kv_cache.reservation import NO_COPIES, BlockCopies, Reservation
from inflight.kv_cache.retention import BlockRetention, Retention
from inflight.kv_cache.sequence import KvSequence, RequestCounts

_MAX_REPORTED_FAULTS = 5


class KvCacheManager(PoolMatching):
    """The books of one pool of the paged KV cache; the KV itself lies with the model runner.

    An open request that holds blocks is *started*; ``reserve`` starts it, ``release`` undoes that.
    In every iteration ``reserve`` makes room, the copies it returns are made, the forward pass
    writes, and ``commit`` says that all this was done. Blocks that were reserved and not committed
    never become reusable. Not thread-safe.

    With a ``window``, the sliding window of all layers that write here, ``commit`` gives up the
    blocks that no query of the request will see again. They stay cached, and their places in the
    table keep valid ids whose contents are somebody else's.

    It satisfies ``scheduler.ports.KvCapacity`` and, as the one pool of that, ``PoolCapacity``. Only
    ``reserve`` lowers ``num_free_blocks``.
    """

    def __init__(
        self,
        num_blocks: int,
        config: KvCacheConfig,
        *,
        window: int | None = None,
        number: int = 0,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[BlockObserver] = (),
    ) -> None:
        """``num_blocks``: what the ``config`` came to. ``window``: None, all tokens are kept.
        ``number``: of the pool, among the model's. ``clock``: seconds, for retention."""
        super().__init__(num_blocks, config, ObservedPool(number, window), clock, observers)
        self._committer = BlockCommitter(self._pool, self._prefixes, config.tokens_per_block)
        self._num_reused = 0
        self._num_missed = 0

    @property
    def pools(self) -> Sequence[KvCacheManager]:
        """This one."""
        return (self,)

    def open(
        self,
        request_id: int,
        identity: PrefixIdentity | None = None,
        retention: BlockRetention | None = None,
        *,
        keys: list[BlockKey] | None = None,
    ) -> None:
        """Makes a request known. It reuses only blocks of requests with an equal identity.
        ``keys``: as ``KvSequence`` has it."""
        assert request_id not in self._sequences, f"request {request_id} is already open"
        self._sequences[request_id] = KvSequence(
            request_id, identity or PrefixIdentity(), retention, self._tokens_per_block, keys
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
            for block in parent.held_blocks:
                self._pool.share(block)

    def onboard(
        self,
        request_id: int,
        token_ids: npt.NDArray[np.int32],
        retentions: Sequence[Retention],
        write: WriteBlocks,
    ) -> int:
        """Puts the first of ``missing_blocks`` into the cache, held by nobody: one for each of
        ``retentions``, which count where the request says nothing of a block.

        Returns how many there was room for. ``write`` fills them; see ``insert_cached``. Call it
        between two iterations.
        """
        sequence = self._sequences[request_id]
        missing = self.missing_blocks(request_id, token_ids)
        nodes = self._lookup.whole_blocks(sequence, token_ids).nodes
        root = self._tree.root(sequence.root_digest)
        keys = [
            (key, sequence.retention_of(index) or retention)
            for index, (key, retention) in enumerate(
                zip(missing, retentions, strict=False), len(nodes)
            )
        ]
        return insert_cached(self._pool, (root, nodes), keys, write) if keys else 0

    def reserve(self, extents: Iterable[KvExtent]) -> BlockCopies:
        """Makes every request hold slots for all tokens of its extent; all or nothing.

        A request that is not started reuses [0, extent.start): all that ``match_prefix`` offered,
        or fewer whole blocks. The copies that are returned must be made before the forward pass; a
        request whose copies were not made must be released or closed. Raises OutOfBlocksError, with
        nothing changed, when there are too few blocks or when a prefix is no longer cached. One
        extent a request.
        """
        reservation = self.plan(extents)
        return NO_COPIES if reservation is None else self.carry_out(reservation)

    def plan(self, extents: Iterable[KvExtent]) -> Reservation | None:
        """The first half of ``reserve``: raises what it raises, and changes nothing. None: every
        slot is held already."""
        growing = []
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            if sequence.capacity < extent.end or sequence.is_forked:
                growing.append((sequence, extent))
        if not growing:
            return None
        reservation = Reservation(
            self._pool, self._tree, self._prefixes, prefer_take_over=not self._copies_parts
        )
        for sequence, extent in growing:
            reservation.add(sequence, extent)
        reservation.check_fit()
        return reservation

    def carry_out(self, reservation: Reservation) -> BlockCopies:
        """The second half, which cannot fail; nothing happens between the two."""
        copies = reservation.carry_out()
        self._num_reused += reservation.num_reused
        self._num_missed += reservation.num_missed
        return copies

    def commit(self, extents: Iterable[KvExtent]) -> None:
        """The KV of each extent is written: blocks that became full become reusable at once, and
        those that the window has passed are given up.

        Where an equal block is in the tree already and held by somebody, this request's own stays
        private; its table never changes.
        """
        for extent in extents:
            sequence = self._sequences[extent.request_id]
            assert extent.start == sequence.history_length
            assert extent.start < extent.end <= sequence.capacity
            if sequence.has_pending_copy:
                self._committer.settle_copy(sequence)
            sequence.history_length = extent.end
            sequence.written_ids = extent.token_ids
            num_full = extent.end // self._tokens_per_block
            if num_full > sequence.num_committed_blocks and self._reuses:
                self._committer.commit_blocks(sequence, extent.token_ids, num_full)
            if self._window is not None:
                first = first_block_seen(extent.end, self._window, self._tokens_per_block)
                for block in sequence.pass_blocks(first):
                    self._pool.release(block)

    def release(self, request_id: int) -> None:
        """Pauses a request: it stays open and holds nothing. What it wrote stays cached, full
        blocks and, with partial reuse, the beginning of the last one."""
        sequence = self._sequences[request_id]
        if not sequence.has_pending_copy and self._reuses_parts:
            self._committer.commit_part(sequence)
        self._committer.settle_copy(sequence)
        # Tail first: eviction then meets a prefix's last block before its first.
        for block in reversed(sequence.clear()):
            self._pool.release(block)

    def close(self, request_id: int) -> None:
        """Ends a request: releases its blocks and forgets it."""
        assert request_id in self._sequences, f"request {request_id} is not open"
        self.release(request_id)
        del self._sequences[request_id]

    def cached_blocks(self) -> Iterator[tuple[int, BlockKey, Retention]]:
        """Of ``BlockPool.most_valuable_first``; nothing may change meanwhile."""
        nodes = self._pool.most_valuable_first()
        return ((node.block.block_id, node.key, node.block.retention) for node in nodes)

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
            alloc_new_blocks=pool.num_allocated - pool.num_evicted - pool.num_taken_over,
            reused_blocks=self._num_reused,
            missed_blocks=self._num_missed,
            evicted_blocks=pool.num_evicted,
        )

    def check_integrity(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Counts everything again, O(num_blocks); raises IntegrityError that says what is wrong.
        Leaves it at what it has counted once ``goes_on`` (asked often) says False."""
        books = PoolBooks(
            self._pool, self._tree, self._prefixes, self._sequences.values(), self._window
        )
        faults = find_faults(books, goes_on)
        reported = list(islice(faults, _MAX_REPORTED_FAULTS))
        if reported:
            raise IntegrityError("; ".join(reported))
