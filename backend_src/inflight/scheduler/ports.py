"""KvCapacity: all that the scheduler may ask of the KV cache. It only reads; nothing changes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.api.kv import PrefixMatch


class KvCapacity(Protocol):
    """The scheduler's read-only view of the KV cache; sizes are in blocks."""

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody references: empty ones and cached ones that may be evicted."""
        ...

    def num_held_blocks(self, request_id: int) -> int:
        """Blocks in the request's table; 0 while it is queued."""
        ...

    def num_releasable_blocks(self, request_id: int) -> int:
        """Blocks that become free if this request is released: held by nobody else."""
        ...

    def next_block(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> bytes | None:
        """The name of the block that a started request makes reusable next, if ``token_ids``
        (int32[n], all it has) fill it; to be compared with ``PrefixMatch.next_block``."""
        ...

    def match_prefix(self, request_id: int, token_ids: npt.NDArray[np.int32]) -> PrefixMatch:
        """How much of ``token_ids`` (int32[n]) could be reused now by this queued request."""
        ...
