"""BlockMover: KV blocks between the model runner's cache and host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from inflight.kv_cache.tiers.storage import BlockContent, TierBlock

logger = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """The part of ``ModelRunner`` that moves blocks."""

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]: ...

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: npt.NDArray[np.uint8]
    ) -> None: ...


class NotWrittenError(Exception):
    """The runner did not take blocks."""


class BlockMover:
    """On the engine thread, which computes nothing meanwhile."""

    def __init__(self, memory: BlockMemory, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        """That all moves took, since the start."""
        self._memory = memory
        self._clock = clock

    def read(self, block_id: int) -> BlockContent | None:
        """None: the runner did not give it, and the block is lost, which is no reason to stop."""
        began = self._clock()
        try:
            contents = self._memory.read_blocks(np.array([block_id], dtype=np.int32))
            return cast(BlockContent, contents[0])
        except Exception as error:
            logger.error("a KV block was not read: %s", type(error).__name__, exc_info=error)
            return None
        finally:
            self.seconds += self._clock() - began

    def write(self, block_ids: npt.NDArray[np.int32], blocks: Sequence[TierBlock]) -> None:
        """``block_ids``: int32[n], where the first n of ``blocks`` go. Raises NotWrittenError."""
        began = self._clock()
        try:
            for at in range(len(block_ids)):
                self._memory.write_blocks(block_ids[at : at + 1], blocks[at].content[None])
        except Exception as error:
            raise NotWrittenError from error
        finally:
            self.seconds += self._clock() - began
