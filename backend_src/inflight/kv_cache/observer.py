"""BlockObserver: who wants to hear which full blocks become reusable, and which cease to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.radix_tree import Node, Root
from inflight.kv_cache.retention import Retention


class ObservedPool(NamedTuple):
    """Which of the model's pools a block belongs to."""

    number: int = 0
    """Layers without a window, where there are any, have the first one."""
    window: int | None = None
    """Of its layers; None: they see everything."""


FIRST_POOL = ObservedPool()


class ObservedBlock(NamedTuple):
    """A full block of the prefix index, as it is at the moment of the call."""

    block_id: int
    key: BlockKey
    parent_digest: bytes | None
    """None: the first block of a sequence."""
    root_digest: bytes
    """``PrefixIdentity.root_digest`` of the requests that can reuse it."""
    retention: Retention
    pool: ObservedPool

    @classmethod
    def of(cls, node: Node, pool: ObservedPool) -> ObservedBlock:
        root: Node | Root = node.parent
        while isinstance(root, Node):
            root = root.parent
        parent_digest = node.parent.digest
        return cls(
            node.block.block_id,
            node.key,
            None if parent_digest == root.identity_digest else parent_digest,
            root.identity_digest,
            node.block.retention,
            pool,
        )


class BlockObserver(Protocol):
    """Called on the engine thread, from inside ``commit`` and ``reserve``: it must be quick, must
    not raise and must not call the KV cache. Parts of blocks are never told."""

    def stored(self, block: ObservedBlock) -> None:
        """A match finds this block from now on."""
        ...

    def removed(self, blocks: Sequence[ObservedBlock]) -> None:
        """No match finds them any more; their slots go to somebody else. All that one ``reserve``
        or ``onboard`` evicts come together, in the order in which they went, at least one.

        Their slots are still intact: an offloader that wants the KV must read it now, before the
        copies that ``reserve`` is about to return, and before the forward pass.
        """
        ...


class CacheObservers(NamedTuple):
    """Who hears of the blocks of each level, of all pools. A block that moves down is stored there
    before it is removed above. ``block_id`` and ``retention`` of a block in a tier are those it had
    when it was evicted."""

    primary: Sequence[BlockObserver] = ()
    host: Sequence[BlockObserver] = ()
    """Host memory: its tier, and the queue to the disk."""
    disk: Sequence[BlockObserver] = ()


NO_OBSERVERS = CacheObservers()
