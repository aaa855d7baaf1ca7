"""How K and V are stored: the dtypes, their sizes, int8 with its scales, and the memory itself.

int8 has one scale for each token, KV head and of K or V. A token that is appended then changes
nothing that is stored already, blocks are copied and shared as they are, and a token is stored the
same whatever its batch, its chunk or its neighbours are. With one scale for a block, each appended
token could raise it, and all older ones would have to be rounded again.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.errors import ConfigError

KV_KINDS: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What the native attention can store; the numbers are KvKind of src/attention.h."""

BlockBytes = npt.NDArray[np.uint8]

SCALE_DTYPE = torch.float32
LARGEST_INT8 = 127.0


def bytes_per_head(dim: int, dtype: torch.dtype) -> int:
    """Bytes that the K, or the V, of one token and KV head takes."""
    scale = SCALE_DTYPE.itemsize if dtype is torch.int8 else 0
    return dim * dtype.itemsize + scale


def quantize_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """int8[..., D] and fp32[...] for heads [..., D]: whole multiples of a scale, which is a 127th
    of the largest magnitude; halves round to even.

    The native kernels (src/attention_rows.h) take the same steps in fp32 and get the same bits.
    What is not finite makes its scale so too.
    """
    heads = heads.float()
    scales = heads.abs().amax(-1) / LARGEST_INT8
    divisors = scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)
    whole = (heads / divisors).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return whole.nan_to_num().to(torch.int8), scales


def untouched_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written, in huge pages where the system gives them.

    Straight from the system: an allocator might hand out memory that was used before. Raises
    MemoryError where there is no room for the addresses.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from None
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def read_blocks(
    tensors: Sequence[Tensor], block_ids: npt.NDArray[np.int32]
) -> Sequence[BlockBytes]:
    """Of each block uint8[bytes of a block], in memory of its own: its part of every tensor, one
    after the other. Blocks lie along axis 1 of the tensors."""
    as_bytes = [tensor.view(torch.uint8) for tensor in tensors]
    contents = []
    for block_id in block_ids.tolist():
        parts = [tensor[:, block_id] for tensor in as_bytes]
        content: BlockBytes = np.empty(sum(part.numel() for part in parts), dtype=np.uint8)
        start = 0
        for part in parts:
            target = content[start : start + part.numel()].reshape(part.shape)
            np.copyto(target, part.cpu().numpy())
            start += target.nbytes
        contents.append(content)
    return contents


def write_blocks(
    tensors: Sequence[Tensor],
    block_ids: npt.NDArray[np.int32],
    contents: Sequence[BlockBytes],
) -> None:
    """What ``read_blocks`` gave, of a storage of the same tensors, into other blocks.

    On the CPU every byte is moved once: 7 GB/s were measured, and 2.5 with ``index_copy_``.
    """
    for content, block_id in zip(contents, block_ids.tolist(), strict=True):
        start = 0
        for tensor in tensors:
            target = tensor.view(torch.uint8)[:, block_id]
            part = content[start : start + target.numel()].reshape(target.shape)
            start += part.nbytes
            if target.device.type == "cpu":
                np.copyto(target.numpy(), part)
            else:
                target.copy_(torch.from_numpy(part.copy()))  # torch takes nothing read-only
        assert start == content.nbytes


def no_memory(num_blocks: int, tokens_per_block: int, bytes_per_token: int) -> ConfigError:
    size = num_blocks * tokens_per_block * bytes_per_token
    return ConfigError(
        f"kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache: no memory for {num_blocks} "
        f"KV blocks of {tokens_per_block} tokens ({size >> 20} MiB)"
    )
