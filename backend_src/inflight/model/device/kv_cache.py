"""DeviceKvCache: the KV storage of a decoder on its device, and the ways in and out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv import MOVED_BYTES
from inflight.kernels.kv_layout import KvShape
from inflight.model.device.host_pool import HostPool
from inflight.model.device.ops import DeviceOps
from inflight.model.device.runtime import DeviceRuntime
from inflight.native.kv_storage import no_memory

BLOCK_LAYOUT = 1
"""Of what ``gather_blocks`` gives; to be raised with it: blocks on disk may be older."""


class DeviceKvCache:
    """Blocks 0 .. n - 1 are the engine's; one more, the scratch block, belongs to rows that nobody
    wants."""

    def __init__(
        self, shape: KvShape, ops: DeviceOps, runtime: DeviceRuntime, host_bytes: int
    ) -> None:
        """``host_bytes``: how much of the host's memory offloaded blocks will take, besides those
        that are on their way (``MOVED_BYTES``)."""
        self.shape = shape
        self._ops = ops
        self._runtime = runtime
        self._host_bytes = host_bytes
        self._storage: Tensor | None = None
        self._pool: HostPool | None = None
        self._num_moving = 1
        """Blocks that are moved at once, as far as is known here."""

    @property
    def storage(self) -> Tensor:
        """The live tensor, as ``kernels/kv_layout.py`` has it."""
        assert self._storage is not None, "allocate comes first"
        return self._storage

    @property
    def scratch_block(self) -> int:
        return self.storage.shape[2] - 1

    @property
    def pinned_bytes(self) -> int:
        """Of the host's memory."""
        return 0 if self._pool is None else self._pool.pinned_bytes

    @property
    def block_format(self) -> str:
        """See ``ModelRunner.kv_block_format``."""
        return f"device {BLOCK_LAYOUT} {self.shape.dtype}"

    def allocate(self, num_blocks: int, tokens_per_block: int) -> None:
        """Raises ConfigError when there is no room for it."""
        assert self._storage is None and num_blocks * tokens_per_block < 1 << 31
        block_bytes = tokens_per_block * self.shape.bytes_per_token
        try:
            with self._runtime.computing():
                device = self._runtime.device
                self._storage = self.shape.allocate(num_blocks + 1, tokens_per_block, device)
            if num_places := self._host_bytes // block_bytes:
                # A full tier gives up blocks only when those that were read for it are put there.
                self._num_moving = min(num_places, max(1, MOVED_BYTES // block_bytes))
                num_places += self._num_moving
                self._pool = HostPool(num_places, block_bytes, self._runtime.register)
        except (RuntimeError, MemoryError):
            per_token = self.shape.bytes_per_token
            raise no_memory(num_blocks + 1, tokens_per_block, per_token) from None

    def make_ready(self) -> None:
        """Runs all that moves blocks once, on the scratch block: a kernel that is launched for the
        first time is compiled, and no request waits for that. What many blocks at once take of the
        device's memory stays in reserve. Raises as the moves do."""
        many = np.full(self._num_moving, self.scratch_block, dtype=np.int32)
        contents, scratch = self.read_blocks(many), many[:1]
        self.write_blocks(scratch, contents[:1])
        with self._runtime.computing():
            self._ops.copy_blocks(self.storage, self._ids(scratch), self._ids(scratch))

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32]
    ) -> None:
        """As ``ModelRunner.copy_blocks``."""
        with self._runtime.computing():
            sources, targets = self._ids(source_ids), self._ids(target_ids)
            if np.isin(target_ids, source_ids).any():
                contents = self._ops.gather_blocks(self.storage, sources)
                self._ops.scatter_blocks(self.storage, targets, contents)
            else:
                self._ops.copy_blocks(self.storage, sources, targets)

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        """As ``ModelRunner.read_blocks``, with one wait for all; each block comes in a place of the
        host's pool while there are any. The device takes memory for as many blocks meanwhile."""
        places = [self._place() for _ in block_ids]
        with self._runtime.copying():
            gathered = self._ops.gather_blocks(self.storage, self._ids(block_ids))
            for place, content in zip(places, gathered, strict=True):
                torch.from_numpy(place).copy_(content, non_blocking=True)
            self._runtime.mark().wait()
        return places

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """As ``ModelRunner.write_blocks``. It waits for the copies, once for all, because whoever
        calls it measures how long blocks take; memory as in ``read_blocks``."""
        # torch takes nothing read-only.
        sources = [content if content.flags.writeable else content.copy() for content in contents]
        with self._runtime.copying():
            staged = torch.empty(
                (len(sources), self._block_bytes), dtype=torch.uint8, device=self._runtime.device
            )
            for target, source in zip(staged, sources, strict=True):
                target.copy_(torch.from_numpy(source), non_blocking=True)
            self._ops.scatter_blocks(self.storage, self._ids(block_ids), staged)
            self._runtime.mark().wait()

    def _place(self) -> npt.NDArray[np.uint8]:
        """uint8[bytes of a block] of the host, with whatever it held before."""
        place = None if self._pool is None else self._pool.take()
        if place is None:
            place = self._runtime.pinned(self._block_bytes, torch.uint8).numpy()
        return place

    @property
    def _block_bytes(self) -> int:
        return self.storage[:, :, 0].nbytes

    def _ids(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(ids).to(self._runtime.device, non_blocking=True)
