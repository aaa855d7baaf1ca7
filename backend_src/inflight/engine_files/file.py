"""An engine's tensors on disk and back in memory.

``weights.bin`` begins with the tensors that every iteration reads; behind them, on a new page,
lie those that are looked up by row. Every tensor begins at a multiple of 64 bytes. All of it is
checked when it is read: the header (``header.py``), and the numbers by a CRC-32 for each 32 MiB.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from inflight.engine_files.header import (
    DATA_FILE,
    HEADER_FILE,
    DamagedEngineError,
    read_header,
    reading,
    to_disk,
    write_header,
)
from inflight.engine_files.key import EngineKey
from inflight.engine_files.memory import ChecksumError, checksums, read_region
from inflight.engine_files.tree import flatten, restore
from inflight.errors import ConfigError, InflightError
from inflight.native.cpu import gives_huge_pages

_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)
    + (torch.int16, torch.int32, torch.int64)
}

Content = TypeVar("Content")


def write_engine(
    folder: Path, key: EngineKey, content: Any, *, looked_up: Sequence[Tensor] = ()
) -> None:
    """``content``: a dataclass as ``tree`` takes it. ``looked_up``: those of its tensors of which
    an iteration reads some rows only. What was written is on the disk when this returns."""
    tree, tensors = flatten(content)
    rows_only = {id(tensor) for tensor in looked_up}
    order = sorted(range(len(tensors)), key=lambda i: id(tensors[i]) in rows_only)
    num_streamed = sum(id(tensor) not in rows_only for tensor in tensors)
    places: dict[int, int] = {}
    with (folder / DATA_FILE).open("wb") as file:
        for i in order[:num_streamed]:
            places[i] = _append(file, tensors[i], _ALIGNMENT)
        streamed_bytes = _pad(file, mmap.ALLOCATIONGRANULARITY)
        for i in order[num_streamed:]:
            places[i] = _append(file, tensors[i], _ALIGNMENT)
        size = _pad(file, _ALIGNMENT)
        to_disk(file)
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header = {
        "key": asdict(key),
        "streamed_bytes": streamed_bytes,
        "size": size,
        "checksums": _checksums_of_file(folder / DATA_FILE, streamed_bytes, size),
        "tensors": [
            {"dtype": names[each.dtype], "shape": list(each.shape), "offset": places[i]}
            for i, each in enumerate(tensors)
        ],
        "content": tree,
    }
    write_header(folder, header)


def read_engine(folder: Path, kind: type[Content]) -> Content:
    """What ``write_engine`` was given, a ``kind``; the numbers are in huge pages where the system
    gives them. Raises DamagedEngineError; ConfigError where the system does not let us read it,
    which says nothing against the engine."""
    header = read_header(folder)
    try:
        regions = _regions(folder / DATA_FILE, header)
    except ChecksumError as error:
        raise DamagedEngineError(str(error)) from None
    except (KeyError, TypeError, ValueError):
        raise _another_form() from None
    except RuntimeError as error:  # no thread could be started
        raise ConfigError(f"cache_dir: the built engine cannot be read: {error}") from None
    try:
        split = len(regions[0])
        tensors = [_tensor(regions, split, entry) for entry in header["tensors"]]
        content: Content = restore(kind, header["content"], tensors)
    except InflightError as error:
        raise DamagedEngineError(str(error)) from None
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
        raise _another_form() from None
    return content


def _another_form() -> DamagedEngineError:
    return DamagedEngineError(f"{HEADER_FILE} has another form")


def _regions(path: Path, header: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What every iteration reads, and what is looked up."""
    split, size = header["streamed_bytes"], header["size"]
    streamed, looked_up = header["checksums"]
    with reading(path):
        return (
            read_region(path, 0, split, streamed, copy=gives_huge_pages()),
            read_region(path, split, size - split, looked_up, copy=False),
        )


def _tensor(regions: tuple[Tensor, Tensor], split: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape, offset = _DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
    region, start = (regions[0], offset) if offset < split else (regions[1], offset - split)
    nbytes = math.prod(shape) * dtype.itemsize
    if start + nbytes > len(region):
        raise ValueError("a tensor reaches beyond the file")
    return region[start : start + nbytes].view(dtype).view(shape)


def _append(file: IO[bytes], tensor: Tensor, alignment: int) -> int:
    """Writes the tensor and returns where it begins."""
    offset = _pad(file, alignment)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    file.write(flat.numpy().data)
    return offset


def _pad(file: IO[bytes], alignment: int) -> int:
    file.write(bytes(-file.tell() % alignment))
    return file.tell()


def _checksums_of_file(path: Path, split: int, size: int) -> tuple[list[int], list[int]]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        return checksums(view[:split]), checksums(view[split:])
