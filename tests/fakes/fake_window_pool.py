"""FakeWindowPool: the accounting of a pool with a sliding window, block by block, unshared."""

from __future__ import annotations

from collections.abc import Iterable


class FakeWindowPool:
    """Beside a FakeCapacity, which passes on what it reserves, commits and releases. What is reused
    there takes blocks of its own here."""

    def __init__(self, num_blocks: int, tokens_per_block: int, window: int) -> None:
        self.num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._window = window
        self._held: dict[int, set[int]] = {}
        """By request, the indexes of its blocks."""
        self._num_slots: dict[int, int] = {}

    def _blocks_of(self, first: int, end: int) -> set[int]:
        """Those of tokens [first, end) and of what a query at ``first`` sees."""
        seen_from = max(0, first - self._window + 1)
        return {position // self._tokens_per_block for position in range(seen_from, end)}

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(len(held) for held in self._held.values())

    def num_held_blocks(self, request_id: int) -> int:
        return len(self._held.get(request_id, ()))

    num_releasable_blocks = num_kept_blocks = num_held_blocks

    def num_new_blocks(self, request_id: int, end: int) -> int:
        return -(-end // self._tokens_per_block) - self.num_table_blocks(request_id)

    def num_table_blocks(self, request_id: int) -> int:
        return -(-self._num_slots.get(request_id, 0) // self._tokens_per_block)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """By the rule that ``api.kv_pools.most_blocks`` states: the tokens that are held while a
        chunk is written, at the worst place in their blocks."""
        size, held = self._tokens_per_block, self._window - 1 + chunk
        worst = max((place + held - 1) // size + 1 for place in range(size))
        return min(-(-num_tokens // size), worst)

    def num_promisable_blocks(self, request_ids: Iterable[int]) -> int:
        return self.num_blocks

    def reserve(self, request_id: int, start: int, end: int) -> None:
        self._held.setdefault(request_id, set()).update(self._blocks_of(start, end))
        self._num_slots[request_id] = max(self._num_slots.get(request_id, 0), end)
        assert self.num_free_blocks >= 0, "the plan needs more blocks than are free"

    def commit(self, request_id: int, num_tokens: int) -> None:
        slots = self.num_table_blocks(request_id) * self._tokens_per_block
        self._held[request_id] &= self._blocks_of(num_tokens, slots)

    def release(self, request_id: int) -> None:
        del self._held[request_id], self._num_slots[request_id]
