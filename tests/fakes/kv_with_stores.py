"""KvWithStores: a KV cache and the content-checked storage of each of its pools, in step."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.kv_cache import BlockCopies, KvCache, KvExtent
from tests.fakes.checked_kv_store import CheckedKvStore
from tests.fakes.kv_program_checks import (
    OpenRequest,
    check_blocks,
    check_histories,
    check_named_blocks,
    check_tree,
    first_seen,
    observable,
)
from tests.fakes.kv_program_choices import SALTS


class KvWithStores:
    """What a model runner does to the KV of a plan, and what must hold of it at any time."""

    def __init__(self, kv: KvCache, stores: Sequence[CheckedKvStore]) -> None:
        self.kv = kv
        self.stores = stores
        self.requests: dict[int, OpenRequest] = {}
        self._histories: dict[bytes, tuple[str | None, list[int]]] = {}
        """By the name of each block that was ever written, parts included."""

    def copy(self, copies: BlockCopies) -> None:
        for store, of_pool in zip(self.stores, (copies, *copies.further), strict=False):
            store.copy_blocks(*of_pool[:2])

    def write(self, plan: Sequence[KvExtent]) -> int:
        """Returns how many blocks the windows pass with it."""
        num_passed = 0
        for extent in plan:
            request = self.requests[extent.request_id]
            tokens, salt = request.tokens[: extent.end], request.salt
            for pool, store in zip(self.kv.pools, self.stores, strict=True):
                store.write(pool.block_table(extent.request_id), tokens, extent.start, salt)
                passed = first_seen(pool, extent.end) - first_seen(pool, extent.start)
                num_passed += passed // pool.tokens_per_block
            request.written = extent.end
            self._note_names(extent)
        return num_passed

    def _note_names(self, extent: KvExtent) -> None:
        sequence = self.kv.pools[0]._sequences[extent.request_id]
        size, tokens = self.kv.tokens_per_block, extent.token_ids.tolist()
        salt = self.requests[extent.request_id].salt
        for index, key in enumerate(sequence.keys(extent.token_ids, 0, len(tokens) // size)):
            self._histories[key.digest] = salt, tokens[: (index + 1) * size]
        self._histories[sequence.part_key(extent.token_ids).digest] = salt, tokens

    def spoil(self, plan: Sequence[KvExtent]) -> None:
        """A forward that failed leaves garbage where it should have written."""
        for extent in plan:
            for pool, store in zip(self.kv.pools, self.stores, strict=True):
                store.spoil(pool.block_table(extent.request_id), extent.start, extent.end)

    def free(self) -> list[int]:
        """Blocks, pool by pool."""
        return [pool.num_free_blocks for pool in self.kv.pools]

    def free_without(self, request_id: int) -> list[int]:
        """What ``free`` will be when the request has given back what it holds."""
        pools = self.kv.pools
        return [pool.num_free_blocks + pool.num_releasable_blocks(request_id) for pool in pools]

    def free_but_for_sources(self, request_ids: Sequence[int]) -> list[int]:
        """Blocks that are free, or will be as soon as the copies of these requests are made."""
        return [
            pool.num_free_blocks
            + len(
                {
                    source
                    for source in (pool._sequences[i].copy_source for i in request_ids)
                    if source is not None and source.ref_count == 1
                }
            )
            for pool in self.kv.pools
        ]

    def observable(self) -> object:
        """What a plan that is refused must leave as it was."""
        return [observable(pool, self.requests) for pool in self.kv.pools]

    def check(self) -> None:
        """What must hold at any time."""
        check_blocks(self.kv, self.requests)
        check_histories(self.kv, self.stores, self.requests)
        for pool, store in zip(self.kv.pools, self.stores, strict=True):
            if pool._window is None:
                check_tree(pool, store, SALTS)
            else:
                check_named_blocks(pool, store, self._histories)
