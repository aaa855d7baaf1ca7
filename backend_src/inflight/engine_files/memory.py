"""WeightMemory: the bytes of an engine's data file, in huge pages or mapped.

A generation step reads all weights once, at the speed of memory; with pages of 4 KiB much of that
time goes into finding them. So what is read in every iteration is copied into huge pages where the
system gives them and has the memory for a copy, else mapped; what is only looked up is mapped in
any case.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from inflight.native.cpu import usable_cores

CHUNK_BYTES = 32 << 20
"""What one checksum covers."""


class ChecksumError(Exception):
    """The bytes are not those that were written."""


def checksums(data: memoryview) -> list[int]:
    """CRC-32 of each chunk."""
    starts = range(0, len(data), CHUNK_BYTES)
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(lambda start: zlib.crc32(data[start : start + CHUNK_BYTES]), starts))


def read_region(path: Path, start: int, size: int, wanted: Sequence[int], *, copy: bool) -> Tensor:
    """uint8[size] from ``start``, a multiple of the page size, checked against ``wanted``.

    ``copy``: into huge pages, where there is memory for them. Raises ChecksumError, OSError;
    RuntimeError where no thread can be started.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    buffer = _huge_pages(size) if copy else None
    if buffer is not None:
        _fill(buffer, path, start, size)
    else:
        with path.open("rb") as file:
            # A private mapping: torch takes no memory that could not be written.
            buffer = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
    if checksums(memoryview(buffer)) != list(wanted):
        raise ChecksumError(f"{path.name}: a checksum is wrong")
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _huge_pages(size: int) -> mmap.mmap | None:
    """None where the system does not grant so much memory."""
    try:
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None
    with suppress(OSError):  # a kernel that was made without them
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _fill(buffer: mmap.mmap, path: Path, start: int, size: int) -> None:
    view = memoryview(buffer)

    def read_chunk(offset: int) -> int:
        return os.preadv(fd, [view[offset : offset + CHUNK_BYTES]], start + offset)

    with path.open("rb") as file, ThreadPoolExecutor(usable_cores()) as pool:
        fd = file.fileno()
        if sum(pool.map(read_chunk, range(0, size, CHUNK_BYTES))) != size:
            raise ChecksumError(f"{path.name}: it is cut short")
