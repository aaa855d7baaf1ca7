"""BlockMover: KV blocks between the model runner's cache and host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.api.kv import MOVED_BYTES
from inflight.kv_cache.tiers.storage import BlockContent

logger = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """The part of ``ModelRunner`` that moves blocks."""

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[BlockContent]: ...

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[BlockContent]
    ) -> None: ...


class NotWrittenError(Exception):
    """The runner did not take blocks."""


class BlockMover:
    """On the engine thread, which computes nothing meanwhile. Moves as many blocks at once as have
    ``MOVED_BYTES``."""

    def __init__(self, memory: BlockMemory, block_bytes: int, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        """That all moves took, since the start."""
        self._memory = memory
        self._at_once = max(1, MOVED_BYTES // block_bytes)
        self._clock = clock

    def read(self, block_ids: Sequence[int]) -> Iterator[BlockContent | None]:
        """In their order. None: the runner did not give it, and the block is lost, which is no
        reason to stop. Blocks beyond ``MOVED_BYTES`` are read when those before them were taken."""
        for at in range(0, len(block_ids), self._at_once):
            yield from self._read(block_ids[at : at + self._at_once])

    def read_one(self, block_id: int) -> BlockContent | None:
        return self._read([block_id])[0]

    def write(self, block_ids: npt.NDArray[np.int32], contents: Sequence[BlockContent]) -> None:
        """``block_ids``: int32[n], where the first n of ``contents`` go. Raises NotWrittenError."""
        began = self._clock()
        try:
            for at in range(0, len(block_ids), self._at_once):
                ids = block_ids[at : at + self._at_once]
                self._memory.write_blocks(ids, contents[at : at + len(ids)])
        except Exception as error:
            raise NotWrittenError from error
        finally:
            self.seconds += self._clock() - began

    def _read(self, block_ids: Sequence[int]) -> Sequence[BlockContent | None]:
        began = self._clock()
        try:
            return self._memory.read_blocks(np.array(block_ids, dtype=np.int32))
        except Exception as error:
            logger.error(
                "%d KV blocks were not read: %s",
                len(block_ids),
                type(error).__name__,
                exc_info=error,
            )
            return [None] * len(block_ids)
        finally:
            self.seconds += self._clock() - began
