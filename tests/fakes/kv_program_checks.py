"""What must hold of a KV cache at any time, whatever a program of ``kv_programs`` did to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.kv_cache import KvCache, KvCacheManager, KvExtent, PrefixIdentity
from inflight.kv_cache.radix_tree import Node, Root
from tests.fakes.checked_kv_store import CheckedKvStore


@dataclass
class OpenRequest:
    salt: str | None
    tokens: list[int]
    written: int = 0
    """Tokens whose KV the store has."""
    started: bool = False

    def array(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int32)

    def pause(self) -> None:
        self.written = 0
        self.started = False


def check_blocks(kv: KvCache, requests: Mapping[int, OpenRequest]) -> None:
    """The books add up, and in each pool what nobody holds is free. A request holds exactly the
    blocks with tokens that it sees or has slots for."""
    kv.check_integrity()
    for pool in kv.pools:
        held: set[int] = set()
        for request_id, request in requests.items():
            table = pool.block_table(request_id).tolist()
            first = first_seen(pool, request.written) // pool.tokens_per_block
            assert pool.num_held_blocks(request_id) == max(len(table) - first, 0)
            held.update(table[first:])
        assert pool.num_free_blocks == pool.num_blocks - len(held)


def first_seen(pool: KvCacheManager, position: int) -> int:
    """The first token that a query at ``position`` sees."""
    return 0 if pool._window is None else max(0, position - pool._window + 1)


def check_histories(
    kv: KvCache, stores: Sequence[CheckedKvStore], requests: Mapping[int, OpenRequest]
) -> None:
    """Every request reads what it sees of its own history through its tables."""
    for pool, store in zip(kv.pools, stores, strict=True):
        for request_id, request in requests.items():
            written = request.tokens[: request.written]
            start = first_seen(pool, request.written)
            assert store.holds(pool.block_table(request_id), written, request.salt, start)


def is_reusable(pool: KvCacheManager, request_id: int, num_blocks: int) -> bool:
    """Whether the blocks that the next token sees are all there, by their names alone."""
    first = first_seen(pool, num_blocks * pool.tokens_per_block) // pool.tokens_per_block
    names = {node.key.digest for node in pool._tree if pool._tree.is_full(node)}
    keys = pool._sequences[request_id].known_keys[first:num_blocks]
    return len(keys) == num_blocks - first and all(key.digest in names for key in keys)


def check_named_blocks(
    pool: KvCacheManager,
    store: CheckedKvStore,
    histories: Mapping[bytes, tuple[str | None, list[int]]],
) -> None:
    """As ``check_tree``, where blocks are filed alone. ``histories``: by name, the salt and all
    tokens up to the end of a block."""
    size = pool.tokens_per_block
    for node in pool._tree:
        salt, tokens = histories[node.key.digest]
        table = np.full(len(tokens) // size, node.block.block_id, dtype=np.int32)
        assert store.holds(table, tokens, salt, len(tokens) - size)


def check_tree(kv: KvCacheManager, store: CheckedKvStore, salts: Sequence[str | None]) -> None:
    """What a match could find is there, whoever wrote it and whenever."""
    by_root = {PrefixIdentity(salt).root_digest(): salt for salt in salts}
    for leaf in kv._tree:
        if leaf.children:
            continue
        path: list[Node] = []
        node: Node | Root = leaf
        while isinstance(node, Node):
            path.insert(0, node)
            node = node.parent
        content = b"".join(each.key.token_ids for each in path)
        table = np.array([each.block.block_id for each in path], dtype=np.int32)
        tokens = np.frombuffer(content, dtype="<i4").tolist()
        assert store.holds(table, tokens, by_root[node.digest])


def needed_blocks(
    pool: KvCacheManager, requests: Mapping[int, OpenRequest], extent: KvExtent
) -> int:
    """Free blocks that the extent takes if it is alone in its plan; in company it may be less:
    a cached prefix is taken once, and the last holder of a shared block writes it itself."""
    if requests[extent.request_id].started:
        return pool.num_new_blocks(extent.request_id, extent.end)
    sequence, size = pool._sequences[extent.request_id], pool.tokens_per_block
    nodes = pool._prefixes.find(sequence, extent.token_ids, extent.start // size).nodes
    num_referenced = sum(node.block.ref_count > 0 for node in nodes)
    return -(-extent.end // size) - first_seen(pool, extent.start) // size - num_referenced


def check_peaks(kv: KvCache, plan: Sequence[KvExtent]) -> None:
    """While a chunk is written nobody holds more than was promised for chunks of its size."""
    for pool in kv.pools:
        for extent in plan:
            chunk = extent.end - extent.start
            most = pool.most_blocks(extent.end, chunk)
            assert pool.num_held_blocks(extent.request_id) <= most


def observable(pool: KvCacheManager, requests: Iterable[int]) -> object:
    """What a plan that is refused must leave as it was."""
    tables = {i: pool.block_table(i).tolist() for i in requests}
    counts = {i: pool.request_counts(i) for i in requests}
    order = [(b.block_id, b.retention) for b in pool._pool.cached_blocks]
    empty = [block.block_id for block in pool._pool.empty_blocks]
    references = [block.ref_count for block in pool._pool.blocks]
    return tables, counts, order, empty, references, pool.stats()
