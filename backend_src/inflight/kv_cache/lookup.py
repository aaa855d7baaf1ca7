"""PrefixLookup: what a request would find in the cache, and in what the cache lacks of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv import PrefixMatch
from inflight.kv_cache.identity import BlockKey, token_bytes
from inflight.kv_cache.prefix import Prefixes, ReusablePrefix
from inflight.kv_cache.radix_tree import RadixTree
from inflight.kv_cache.sequence import KvSequence


class PrefixLookup:
    """Of one pool. ``token_ids``, int32[n] with n >= 1, are all tokens of the request; the last one
    is never reused, so that one is left to compute. Changes nothing."""

    def __init__(
        self,
        tree: RadixTree,
        prefixes: Prefixes,
        tokens_per_block: int,
        *,
        reuses_parts: bool,
        copies_parts: bool,
    ) -> None:
        """``reuses_parts``: also beginnings of blocks; ``copies_parts``: also of blocks that
        somebody holds or that something follows."""
        self._tree = tree
        self._prefixes = prefixes
        self._tokens_per_block = tokens_per_block
        self._reuses_parts = reuses_parts
        self._copies_parts = copies_parts

    def whole_blocks(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32]
    ) -> ReusablePrefix:
        return self._prefixes.find(sequence, token_ids, self._most(token_ids))

    def match(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], *, is_credited: bool
    ) -> PrefixMatch:
        """``is_credited``: whether blocks that others hold count for the block budget."""
        prefix = self.whole_blocks(sequence, token_ids)
        num_part = self.num_part_tokens(sequence, token_ids, prefix, self._tokens_per_block)
        return PrefixMatch(
            prefix.num_blocks * self._tokens_per_block + num_part,
            sum(node.block.ref_count > 0 for node in prefix.nodes) if is_credited else 0,
            self.name_of(sequence, prefix.num_blocks, token_ids),
        )

    def beginning(
        self, sequence: KvSequence, token_ids: npt.NDArray[np.int32], most: int
    ) -> ReusablePrefix:
        """The longest reusable one of at most ``most`` whole blocks."""
        return self._prefixes.find(sequence, token_ids, most)

    def num_part_tokens(
        self,
        sequence: KvSequence,
        token_ids: npt.NDArray[np.int32],
        prefix: ReusablePrefix,
        most: int,
    ) -> int:
        """How many tokens after ``prefix`` could be taken from a block that begins with them, at
        most ``most``."""
        start = prefix.num_blocks * self._tokens_per_block
        end = min(len(token_ids) - 1, start + min(most, self._tokens_per_block - 1))
        parent = self._prefixes.parent_after(sequence, prefix)
        if not self._reuses_parts or not parent.parts:
            return 0
        if sequence.identity.extra_bytes(start, end + 1):
            return 0
        tokens = token_bytes(token_ids[start:end])
        return self._tree.longest_part(parent, tokens, only_unused=not self._copies_parts)

    def name_of(
        self, sequence: KvSequence, index: int, token_ids: npt.NDArray[np.int32]
    ) -> bytes | None:
        """``PrefixMatch.next_block`` for a request that reuses ``index`` whole blocks."""
        is_whole = index < self._most(token_ids)
        return sequence.known_keys[index].digest if is_whole else None

    def missing(self, sequence: KvSequence, token_ids: npt.NDArray[np.int32]) -> Sequence[BlockKey]:
        """The whole blocks after ``whole_blocks``, in order."""
        keys = list(sequence.keys(token_ids, 0, self._most(token_ids)))
        return keys[self.whole_blocks(sequence, token_ids).num_blocks :]

    def _most(self, token_ids: npt.NDArray[np.int32]) -> int:
        return (len(token_ids) - 1) // self._tokens_per_block
