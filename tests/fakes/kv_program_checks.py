"""What must hold of a KV cache at any time, whatever a program of ``kv_programs`` did to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.kv_cache import KvCacheManager, PrefixIdentity
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


def check_blocks(kv: KvCacheManager, requests: Mapping[int, OpenRequest]) -> None:
    """The books add up, and what is in no table is free."""
    kv.check_integrity()
    held = {block_id for request_id in requests for block_id in kv.block_table(request_id).tolist()}
    assert kv.num_free_blocks == kv.num_blocks - len(held)


def check_histories(
    kv: KvCacheManager, store: CheckedKvStore, requests: Mapping[int, OpenRequest]
) -> None:
    """Every request reads its own history through its table."""
    for request_id, request in requests.items():
        written = request.tokens[: request.written]
        assert store.holds(kv.block_table(request_id), written, request.salt)


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
