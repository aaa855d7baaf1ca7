"""BlockCommitter: makes the blocks that a request has written known to the tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.pool import BlockPool
from inflight.kv_cache.prefix import Prefixes
from inflight.kv_cache.sequence import KvSequence


class BlockCommitter:
    """Files blocks under what ``Prefixes`` names."""

    def __init__(self, pool: BlockPool, prefixes: Prefixes, tokens_per_block: int) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._tokens_per_block = tokens_per_block

    def settle_copy(self, sequence: KvSequence) -> None:
        """The copy that the latest ``reserve`` asked for was made, or is of no more use."""
        sequence.has_pending_copy = False
        source, sequence.copy_source = sequence.copy_source, None
        if source is not None:
            self._pool.release(source)

    def commit_blocks(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], num_full: int
    ) -> None:
        """The first ``num_full`` blocks are full and written; ``token_ids``: int32[n], all."""
        first = sequence.num_committed_blocks
        if first < sequence.num_passed:
            return  # after a collision, in a pool with a window: see below
        parent = self._prefixes.parent(sequence, first)
        for index, key in enumerate(sequence.keys(token_ids, first, num_full), first):
            block = sequence.blocks[index]
            # A fork may have committed the block that both hold.
            if block.node is None and not self._pool.commit(
                block, parent, key, sequence.retention_of(index)
            ):
                return  # a collision: what comes after it has no place in the tree either
            sequence.num_committed_blocks += 1
            if index + 1 < num_full:
                parent = self._prefixes.parent(sequence, index + 1)

    def commit_part(self, sequence: KvSequence) -> None:
        """The last block, if it is not full, of a sequence that is about to be released."""
        num_full, rest = divmod(sequence.history_length, self._tokens_per_block)
        if rest == 0 or sequence.written_ids is None or num_full > sequence.num_committed_blocks:
            return
        block = sequence.blocks[num_full]
        if block.ref_count > 1:
            return  # a fork goes on writing it
        key = sequence.part_key(sequence.written_ids)
        if not key.extra_ids:
            retention = sequence.retention_of(num_full)
            self._pool.commit_part(block, self._prefixes.parent(sequence, num_full), key, retention)
