"""FakeCapacity: the accounting of a paged KV cache, without keys, tiers or storage.

It answers what the scheduler may ask (KvCapacity) and does what an engine does between two passes:
reserve, commit, release. Blocks are shared by the tokens they hold, reference counted, and evicted
in the order in which they were last released.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.scheduler import PrefixMatch
from inflight.scheduler.ports import PoolCapacity
from tests.fakes.fake_window_pool import FakeWindowPool


class _Block:
    """A block of the pool; ``prefix``: all tokens up to its end, once it is full and reusable."""

    __slots__ = ("prefix", "ref_count")

    def __init__(self) -> None:
        self.prefix: tuple[int, ...] | None = None
        self.ref_count = 1


class FakeCapacity:
    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        reuse: bool = True,
        windows: Sequence[FakeWindowPool] = (),
    ) -> None:
        """``windows``: further pools."""
        self.windows = windows
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.matched: list[int] = []
        """Ids given to ``match_prefix``, for tests to read and clear."""
        self._reuse = reuse
        self._tables: dict[int, list[_Block]] = {}
        self._reusable: dict[tuple[int, ...], _Block] = {}
        self._num_written: dict[int, int] = {}
        self._num_referenced = 0

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self._num_referenced

    @property
    def pools(self) -> Sequence[PoolCapacity]:
        return (self, *self.windows)

    def num_held_blocks(self, request_id: int) -> int:
        return len(self._tables.get(request_id, ()))

    num_table_blocks = num_held_blocks

    def num_kept_blocks(self, request_id: int) -> int:
        return self.num_held_blocks(request_id) - self._writes_shared(request_id)

    def num_new_blocks(self, request_id: int, end: int) -> int:
        missing = -(-end // self.tokens_per_block) - self.num_held_blocks(request_id)
        return missing + self._writes_shared(request_id)

    def _writes_shared(self, request_id: int) -> bool:
        """Whether others hold the block that it writes next."""
        table = self._tables.get(request_id, [])
        index = self._num_written.get(request_id, 0) // self.tokens_per_block
        return index < len(table) and table[index].ref_count > 1

    def fork(self, request_id: int, child_id: int) -> None:
        """``child_id`` holds the same blocks; a shared one is copied by who writes it first."""
        assert not self.windows
        table = self._tables[request_id]
        for block in table:
            block.ref_count += 1
        self._tables[child_id] = list(table)
        self._num_written[child_id] = self._num_written[request_id]

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def num_promisable_blocks(self, request_ids: Iterable[int]) -> int:
        return self.num_free_blocks + sum(self.num_kept_blocks(i) for i in request_ids)

    def num_releasable_blocks(self, request_id: int) -> int:
        return sum(block.ref_count == 1 for block in self._tables.get(request_id, ()))

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        assert request_id not in self._tables, "only queued requests are matched"
        self.matched.append(request_id)
        tokens, size = tuple(token_ids.tolist()), self.tokens_per_block
        blocks = self._find(tokens)
        start, end = len(blocks) * size, (len(blocks) + 1) * size
        return PrefixMatch(
            start + self._longest_part(tokens, start),
            sum(block.ref_count > 0 for block in blocks),
            self._name(tokens[:end]) if self._reuse and end < len(tokens) else None,
        )

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        assert request_id in self._tables, "only started requests are asked"
        end = (self._num_written[request_id] // self.tokens_per_block + 1) * self.tokens_per_block
        tokens = tuple(token_ids.tolist())
        return self._name(tokens[:end]) if self._reuse and end <= len(tokens) else None

    def _name(self, prefix: tuple[int, ...]) -> bytes:
        return np.array(prefix, dtype=np.int64).tobytes()

    def _longest_part(self, tokens: tuple[int, ...], start: int) -> int:
        """How many tokens after ``start``, but for the last, begin a block that follows there."""
        longest = 0
        for prefix in self._reusable:
            if len(prefix) == start + self.tokens_per_block and prefix[:start] == tokens[:start]:
                pairs = zip(prefix[start:], tokens[start:-1], strict=False)
                same = [left == right for left, right in pairs]
                longest = max(longest, (*same, False).index(False))
        return longest

    def _find(self, tokens: tuple[int, ...]) -> list[_Block]:
        """The longest chain of reusable blocks that leaves at least one token to compute."""
        blocks: list[_Block] = []
        for end in range(self.tokens_per_block, len(tokens), self.tokens_per_block):
            block = self._reusable.get(tokens[:end])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reserve(self, extents: Sequence[tuple[int, int, npt.NDArray[np.int32]]]) -> None:
        """(request_id, start, tokens up to the end) each; pins all reused blocks, then takes new
        ones. AssertionError where the plan promised reuse or room that is not there."""
        for request_id, _, _ in extents:
            if self._writes_shared(request_id):
                self._copy_shared(self._tables[request_id], self._num_written[request_id])
        for request_id, start, token_ids in extents:
            if request_id not in self._tables:
                tokens = tuple(token_ids.tolist())
                num_whole, part = divmod(start, self.tokens_per_block)
                reused = self._find(tokens)[:num_whole]
                assert len(reused) == num_whole, "the match is gone"
                available = self._longest_part(tokens, num_whole * self.tokens_per_block)
                assert part <= available, "the part that was matched is gone"
                for block in reused:
                    self._num_referenced += block.ref_count == 0
                    block.ref_count += 1
                self._tables[request_id] = reused
        for request_id, _, token_ids in extents:
            table = self._tables[request_id]
            while len(table) * self.tokens_per_block < len(token_ids):
                table.append(self._take())
        for pool in self.windows:
            for request_id, start, token_ids in extents:
                pool.reserve(request_id, start, len(token_ids))

    def _copy_shared(self, table: list[_Block], num_written: int) -> None:
        index = num_written // self.tokens_per_block
        table[index].ref_count -= 1
        table[index] = self._take()

    def _take(self) -> _Block:
        assert self.num_free_blocks > 0, "the plan needs more blocks than are free"
        cached = [prefix for prefix, block in self._reusable.items() if block.ref_count == 0]
        if len(cached) == self.num_free_blocks:
            del self._reusable[cached[0]]
        self._num_referenced += 1
        return _Block()

    def commit(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> None:
        """``token_ids`` have their KV now: full blocks become reusable."""
        tokens = tuple(token_ids.tolist())
        self._num_written[request_id] = len(tokens)
        for index, block in enumerate(self._tables[request_id]):
            prefix = tokens[: (index + 1) * self.tokens_per_block]
            is_full = len(prefix) == (index + 1) * self.tokens_per_block
            if self._reuse and is_full and prefix not in self._reusable:
                block.prefix = prefix
                self._reusable[prefix] = block
        for pool in self.windows:
            pool.commit(request_id, len(tokens))

    def release(self, request_id: int) -> None:
        """Gives the blocks back, the end of the chain first; reusable ones stay until evicted."""
        for block in reversed(self._tables.pop(request_id)):
            block.ref_count -= 1
            self._num_referenced -= block.ref_count == 0
            if block.prefix is not None:
                self._reusable[block.prefix] = self._reusable.pop(block.prefix)
        for pool in self.windows:
            pool.release(request_id)

    def check_integrity(self) -> None:
        """The counts are those of the tables, and no more blocks exist than the pool has."""
        held = [block for table in self._tables.values() for block in table]
        distinct = {id(block): block for block in held}
        assert len(distinct) == self._num_referenced <= self.num_blocks
        assert sum(block.ref_count for block in distinct.values()) == len(held)
        num_cached = sum(block.ref_count == 0 for block in self._reusable.values())
        assert num_cached <= self.num_free_blocks
