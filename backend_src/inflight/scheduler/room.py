"""Room: what is left of each pool's blocks in one pass of a capacity policy."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.api.kv import PrefixMatch
from inflight.batch import LlmRequest
from inflight.scheduler.ports import PoolCapacity


class Room:
    """What is left of each pool when every started request has got what it is charged for, and then
    every new one that ``after`` counts."""

    def __init__(
        self,
        started: Sequence[LlmRequest],
        ends: Sequence[tuple[int, int]],
        pools: Sequence[PoolCapacity],
    ) -> None:
        """``ends``: for each started request the tokens that it is charged for, and its largest
        chunk."""
        self._pools = pools
        self.charges = [[pool.most_blocks(end, chunk) for end, chunk in ends] for pool in pools]
        """Of each pool, the blocks of each started request."""
        self.left = [
            pool.num_promisable_blocks([r.request_id for r in started]) - sum(charged)
            for pool, charged in zip(pools, self.charges, strict=True)
        ]
        """Blocks of each pool; below 0 where there is not enough."""

    def after(self, num_tokens: int, chunk: int, match: PrefixMatch) -> int:
        """Takes what a new request of so many tokens is charged for; returns what is then left of
        the pool that is shortest."""
        for index, pool in enumerate(self._pools):
            self.left[index] -= pool.most_blocks(num_tokens, chunk)
        self.left[0] += match.num_referenced_blocks
        return min(self.left)

    def claims(self, started: Sequence[LlmRequest]) -> list[list[int]]:
        """The charges less what is kept."""
        return [
            [n - pool.num_kept_blocks(r.request_id) for n, r in zip(charged, started, strict=True)]
            for pool, charged in zip(self._pools, self.charges, strict=True)
        ]
