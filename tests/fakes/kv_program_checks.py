"""What must hold of a KV cache at any time, whatever a program of ``kv_programs`` did to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.api.kv import PrefixMatch
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


def check_match(
    kv: KvCache, request_id: int, tokens: Sequence[int], match: PrefixMatch
) -> list[int]:
    """It is the longest that all pools can give. Returns the numbers of whole blocks that a start
    may reuse."""
    first, size = kv.pools[0], kv.tokens_per_block
    num_whole, num_part = divmod(match.num_tokens, size)
    assert match.num_tokens < len(tokens)
    assert 0 <= match.num_referenced_blocks <= num_whole
    if not first._reuses:
        assert match == (0, 0, None)
        return [0]
    reusable = [
        number
        for number in range((len(tokens) - 1) // size + 1)
        if all(is_reusable(pool, request_id, number) for pool in kv.pools)
    ]
    assert num_whole == max(reusable)
    longest = min(longest_part(pool, request_id, tokens, num_whole) for pool in kv.pools)
    if not first._reuses_parts:
        assert num_part == 0
    else:  # without copies only those of blocks that nobody uses
        assert num_part == longest or (num_part < longest and not first._copies_parts)
    return reusable


def longest_part(
    pool: KvCacheManager, request_id: int, tokens: Sequence[int], num_whole: int
) -> int:
    """Of the tokens after so many whole blocks, all but the last one of all, how many begin a block
    that was filed after those; by looking at every block."""
    size, sequence = pool.tokens_per_block, pool._sequences[request_id]
    before = sequence.known_keys[num_whole - 1].digest if num_whole else sequence.root_digest
    wanted = tokens[num_whole * size : min(len(tokens) - 1, (num_whole + 1) * size - 1)]
    longest = 0
    for node in pool._tree:
        if node.key.parent_digest == before:
            found = np.frombuffer(node.key.token_ids, dtype="<i4").tolist()
            common = [a == b for a, b in zip(found, wanted, strict=False)]
            longest = max(longest, [*common, False].index(False))
    return longest


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
        table = np.full(-(-len(tokens) // size), node.block.block_id, dtype=np.int32)
        assert store.holds(table, tokens, salt, (len(tokens) - 1) // size * size)


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
    num_whole, first = extent.start // size, first_seen(pool, extent.start) // size
    nodes = pool._prefixes.find(sequence, extent.token_ids, num_whole).nodes
    held = nodes[len(nodes) - (num_whole - first) :]
    num_referenced = sum(node.block.ref_count > 0 for node in held)
    return -(-extent.end // size) - first - num_referenced


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
