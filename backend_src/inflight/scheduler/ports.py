"""KvCapacity: all that the scheduler may ask of the KV cache. It only reads; nothing changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.api.kv import PrefixMatch


class PoolCapacity(Protocol):
    """The blocks of the layers that share a pool. A started request has a table in each pool; where
    the layers have a sliding window, it holds only the last blocks of that."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody references: empty ones and cached ones that may be evicted."""
        ...

    def num_kept_blocks(self, request_id: int) -> int:
        """Blocks that the request holds and goes on with: all but the one that it writes next where
        others hold that too, as it gets a copy then. 0 while it is queued."""
        ...

    def num_new_blocks(self, request_id: int, end: int) -> int:
        """Blocks that a started request takes from the free ones to write up to token ``end``: for
        slots that it has not, and for the copy of a block that others hold too."""
        ...

    def num_releasable_blocks(self, request_id: int) -> int:
        """Blocks that become free if this request is released: held by nobody else."""
        ...

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a request holds at most at once until it has ``num_tokens`` tokens, written
        no more than ``chunk`` at a time."""
        ...

    def num_promisable_blocks(self, request_ids: Iterable[int]) -> int:
        """Blocks of which these, all the started requests, and any new ones can be promised
        ``most_blocks`` each.

        Without a window: the free ones, and what each of these keeps, a shared block once for each
        holder, as none lets go of it before its end. With one: all. A shared block is given up by
        one holder while another goes on with it, so everybody has to find room for its own.
        """
        ...


class KvCapacity(Protocol):
    """The scheduler's read-only view of the KV cache; sizes are in blocks."""

    @property
    def tokens_per_block(self) -> int:
        """Of all pools."""
        ...

    @property
    def pools(self) -> Sequence[PoolCapacity]:
        """At least one. A request needs blocks of all of them."""
        ...

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        """The name of the block that a started request makes reusable next, if ``token_ids``
        (int32[n], all it has) fill it; to be compared with ``PrefixMatch.next_block``."""
        ...

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        """How much of ``token_ids`` (int32[n]) could be reused now by this queued request."""
        ...
