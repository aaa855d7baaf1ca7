"""PoolCounts: the books of one pool, and what the scheduler may count in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import most_blocks
from inflight.kv_cache.observer import BlockObserver, ObservedPool
from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.radix_tree import RadixTree
from inflight.kv_cache.sequence import KvSequence


class PoolCounts:
    """The half of ``KvCacheManager`` that only reads: ``scheduler.ports.PoolCapacity``."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        pool: ObservedPool,
        clock: Callable[[], float],
        observers: Sequence[BlockObserver],
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} KV blocks: must be >= 1")
        self._num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._window = pool.window
        self._tree = RadixTree(tokens_per_block)
        self._pool = BlockPool(num_blocks, self._tree, clock, observers, pool)
        self._sequences: dict[int, KvSequence] = {}
        """By request id."""

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

    def block_table(self, request_id: int) -> npt.NDArray[np.int32]:
        """Ids of the blocks in the order of the tokens, int32[num_table_blocks], read-only.

        A view of the request's one table: stale after the next ``reserve`` or ``release``.
        """
        return self._sequences[request_id].table

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Id and written tokens of every open request, in the order in which they were opened."""
        return ((i, sequence.history_length) for i, sequence in self._sequences.items())

    def num_held_blocks(self, request_id: int) -> int:
        """Blocks that the request holds; 0 unless it is started."""
        return self._sequences[request_id].num_held_blocks

    def num_kept_blocks(self, request_id: int) -> int:
        """See ``scheduler.ports.PoolCapacity``."""
        sequence = self._sequences[request_id]
        return sequence.num_held_blocks - sequence.writes_shared

    def num_new_blocks(self, request_id: int, end: int) -> int:
        """Blocks that ``reserve`` takes from the free ones for a started request to write up to
        token ``end`` (more than are written), if nobody else writes; O(1)."""
        sequence = self._sequences[request_id]
        missing = -(-end // self._tokens_per_block) - sequence.num_blocks
        return missing + sequence.writes_shared

    def num_table_blocks(self, request_id: int) -> int:
        """Places of the request's table, those that its window has passed included."""
        return self._sequences[request_id].num_blocks

    def num_releasable_blocks(self, request_id: int) -> int:
        """By how much ``num_free_blocks`` grows if this request is released now; O(held)."""
        return sum(block.ref_count == 1 for block in self._sequences[request_id].held_blocks)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """See ``api.kv_pools.most_blocks``."""
        if self._window is None:  # called for each started request, in most iterations
            return -(-num_tokens // self._tokens_per_block)
        return most_blocks(
            num_tokens, self._window, chunk=chunk, tokens_per_block=self._tokens_per_block
        )

    def num_promisable_blocks(self, request_ids: Iterable[int]) -> int:
        """See ``scheduler.ports.PoolCapacity``."""
        if self._window is not None:
            return self._num_blocks
        sequences = [self._sequences[i] for i in request_ids]
        return self._pool.num_free + sum(s.num_blocks - s.writes_shared for s in sequences)
