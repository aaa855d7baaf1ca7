"""PoolMatching: what of a request a pool could give it without computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.executor_config import KvCacheConfig
from inflight.api.kv import PrefixMatch
from inflight.kv_cache.counts import PoolCounts
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.lookup import PrefixLookup
from inflight.kv_cache.observer import BlockObserver, ObservedPool
from inflight.kv_cache.prefix import Prefixes, ReusablePrefix, WholePrefixes, WindowPrefixes


class PoolMatching(PoolCounts):
    """The part of ``KvCacheManager`` that looks prefixes up and changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        config: KvCacheConfig,
        pool: ObservedPool,
        clock: Callable[[], float],
        observers: Sequence[BlockObserver],
    ) -> None:
        super().__init__(num_blocks, config.tokens_per_block, pool, clock, observers)
        self._reuses = config.enable_block_reuse
        self._reuses_parts = self._reuses and config.enable_partial_reuse
        self._copies_parts = config.copy_on_partial_reuse
        self._prefixes: Prefixes = WholePrefixes(self._tree)
        if pool.window is not None:
            self._prefixes = WindowPrefixes(self._tree, pool.window, config.tokens_per_block)
        self._lookup = PrefixLookup(
            self._tree,
            self._prefixes,
            config.tokens_per_block,
            reuses_parts=self._reuses_parts,
            copies_parts=self._copies_parts,
        )

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
        return self._lookup.match(sequence, token_ids, is_credited=self._window is None)

    def beginning(
        self, request_id: int, token_ids: npt.NDArray[np.int32], most: int
    ) -> ReusablePrefix:
        """The whole blocks that could be reused if no more than ``most`` were: where there is a
        window, it may be fewer than ``most`` though ``match_prefix`` offers more."""
        return self._lookup.beginning(self._sequences[request_id], token_ids, most)

    def num_part_tokens(
        self,
        request_id: int,
        token_ids: npt.NDArray[np.int32],
        prefix: ReusablePrefix,
        most: int,
    ) -> int:
        """Tokens after ``prefix`` (of ``beginning``) that could be reused from a part of a block if
        no more than ``most`` were."""
        sequence = self._sequences[request_id]
        return self._lookup.num_part_tokens(sequence, token_ids, prefix, most)

    def name_of_block(
        self, request_id: int, token_ids: npt.NDArray[np.int32], index: int
    ) -> bytes | None:
        """``PrefixMatch.next_block`` after ``index`` reused blocks, once ``match_prefix`` was
        called with the same tokens."""
        if not self._reuses:
            return None
        return self._lookup.name_of(self._sequences[request_id], index, token_ids)

    def missing_blocks(
        self, request_id: int, token_ids: npt.NDArray[np.int32]
    ) -> Sequence[BlockKey]:
        """The whole blocks that ``match_prefix`` would offer as well if they were in the cache, in
        order: what other tiers may be asked for. Not for a pool with a window."""
        assert self._window is None, "there are no tiers below a pool with a window"
        if not self._reuses:
            return ()
        return self._lookup.missing(self._sequences[request_id], token_ids)

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        """The name of the block that a started request makes reusable next, if ``token_ids``
        (int32[n], all it has) fill it; see ``PrefixMatch.next_block``."""
        sequence = self._sequences[request_id]
        index = sequence.num_committed_blocks
        if not self._reuses or len(token_ids) < (index + 1) * self._tokens_per_block:
            return None
        return next(sequence.keys(token_ids, index, index + 1)).digest
