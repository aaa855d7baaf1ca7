"""TierStorage: what every tier promises, whatever it keeps blocks in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import DEFAULT_RETENTION, Retention

BlockContent = npt.NDArray[np.uint8]
"""uint8[block_bytes]: the KV of one block, as ``ModelRunner.read_blocks`` gives it. Nobody writes
into it any more."""


class TierBlock(NamedTuple):
    """A full block outside the primary pool."""

    key: BlockKey
    """The digest finds it; tokens and extra ids are compared on every hit."""
    content: BlockContent
    retention: Retention = DEFAULT_RETENTION
    """What its requests said of it; its duration runs on from tier to tier."""


class LazyBlock(NamedTuple):
    """A full block whose content is copied only where it is wanted."""

    key: BlockKey
    retention: Retention
    read: Callable[[], BlockContent | None]
    """None: it cannot be read."""


class TierUsage(NamedTuple):
    num_blocks: int
    used_bytes: int
    max_bytes: int


class TierStorage(Protocol):
    """One tier. It holds at most ``max_bytes``, and gives up first what ``TierIndex`` says.

    It never raises for what a device does: a block that cannot be written or read back exactly as
    it was is a miss.
    """

    @property
    def usage(self) -> TierUsage: ...

    def contains(self, key: BlockKey) -> bool:
        """Whether ``get`` is likely to find the block; quick, without any I/O."""
        ...

    def get(self, key: BlockKey) -> TierBlock | None:
        """What was put under this key, tokens compared, with what counts for it by now; None: a
        miss. It counts as used."""
        ...

    def put(self, block: TierBlock) -> Sequence[TierBlock]:
        """Keeps the block, or does what ``renew`` does if it is here. Returns what was given up for
        it and can go to the next tier, the least valuable first: maybe ``block`` itself, where it
        is worth less than the others or larger than all."""
        ...

    def renew(self, key: BlockKey, retention: Retention) -> None:
        """The block counts as used, with this retention; one that is not here is ignored. Quick,
        without any I/O."""
        ...

    def remove(self, key: BlockKey) -> None:
        """Forgets the block; one that is not here is ignored."""
        ...


class SlowStorage(TierStorage, Protocol):
    """A tier that a writer and a reader of its own stand before."""

    on_lost: Callable[[bytes], None]
    """Called on any thread with the digest of a block that is not here any more."""
    written_bytes: int
    """Of KV, since the start."""
    num_io_errors: int
    num_bad_files: int

    def close(self, blocks: Iterable[LazyBlock], deadline: float) -> int:
        """The end; where it outlives the process, ``blocks`` are left to the next one, the most
        valuable first, until ``deadline`` (of ``time.monotonic``). Returns how many are."""
        ...

    def abandon(self) -> None:
        """Instead of ``close``, while the writer hangs: what must not outlive the process is
        deleted, also what is being written. May hang as the writer does."""
        ...
