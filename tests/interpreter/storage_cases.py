"""Copies of KV blocks, and the arg-max of logits, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from inflight.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from inflight.kernels.kv_layout import KvShape
from inflight.kernels.likeliest import likeliest, likeliest_parts
from tests.interpreter.case import DTYPES, Case, exact, poisoned, random, seeded

NUM_BLOCKS = 7
BLOCK_SHAPES = ((2, 3, 16, 64), (3, 1, 32, 80), (1, 2, 128, 96))
"""(layers, KV heads, tokens per block, head size)."""


def storage_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in BLOCK_SHAPES:
            layers, heads, tokens, head_dim = shape
            words = f"{layers} layers, {heads} heads of {head_dim}, blocks of {tokens}"
            for kernel, run in (
                ("copy_blocks", _run_copy),
                ("gather_blocks", _run_gather),
                ("scatter_blocks", _run_scatter),
            ):
                yield Case(
                    kernel=kernel,
                    dtype=dtype,
                    shape=words,
                    sizes={"head size": head_dim, "block": tokens},
                    run=partial(run, dtype, shape),
                )
        for vocab_size in (1, 4096, 4099, 49152):
            yield Case(
                kernel="likeliest",
                dtype=dtype,
                shape=f"vocabulary of {vocab_size}",
                sizes={"vocabulary": vocab_size},
                run=partial(_run_likeliest, dtype, vocab_size),
            )


def _storage(dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Of all bit patterns, NaNs of every kind among them."""
    layers, heads, tokens, head_dim = shape
    layout = KvShape(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype=dtype)
    storage = layout.allocate(NUM_BLOCKS, tokens, device)
    assert storage.nbytes == NUM_BLOCKS * tokens * layout.bytes_per_token
    content = torch.randint(0, 256, (storage.nbytes,), generator=seeded(3), dtype=torch.uint8)
    storage.view(torch.uint8).view(-1).copy_(content)
    return storage


def _ids(device: torch.device, *ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _run_copy(dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device) -> float:
    storage = _storage(dtype, shape, device)
    want = storage.clone()
    want[:, :, [0, 4, 2]] = storage[:, :, [6, 6, 5]]
    copy_blocks(storage, _ids(device, 6, 6, 5), _ids(device, 0, 4, 2))
    return exact(storage, want)


def _run_gather(
    dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device
) -> float:
    storage = _storage(dtype, shape, device)
    before = storage.clone()
    block_bytes = storage.nbytes // NUM_BLOCKS
    flat = torch.full((4, block_bytes), 77, dtype=torch.uint8, device=device)
    gather_blocks(storage, _ids(device, 5, 0, 5), flat[:3])
    want = torch.stack([before[:, :, block] for block in (5, 0, 5)])
    untouched = 0.0 if bool((flat[3] == 77).all()) else torch.inf
    return max(
        exact(flat[:3].view(dtype).view(want.shape), want), exact(storage, before), untouched
    )


def _run_scatter(
    dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device
) -> float:
    storage = _storage(dtype, shape, device)
    block_bytes = storage.nbytes // NUM_BLOCKS
    flat = torch.randint(0, 256, (2, block_bytes), generator=seeded(4), dtype=torch.uint8)
    flat = flat.to(device)
    want = storage.clone()
    for row, block in enumerate((3, 1)):
        want[:, :, block] = flat[row].view(dtype).view(want[:, :, block].shape)
    scatter_blocks(storage, _ids(device, 3, 1), flat)
    return exact(storage, want)


def _run_likeliest(dtype: torch.dtype, vocab_size: int, device: torch.device) -> float:
    """Rows: plain, two equal ones, one NaN, nothing but -inf, the largest at the end."""
    logits = random(seeded(vocab_size), 5, vocab_size).to(dtype)
    logits[1, [vocab_size // 3, vocab_size - 1]] = 8.0
    logits[2, vocab_size // 2] = torch.nan
    logits[3] = -torch.inf
    logits[4, -1] = 9.0
    ids = torch.full((5,), -7, dtype=torch.int32, device=device)
    largest = poisoned(5, dtype=torch.float32, device=device)
    num_parts = 5 * likeliest_parts(vocab_size)
    room = (
        poisoned(num_parts, dtype=torch.float32, device=device),
        torch.full((num_parts,), -7, dtype=torch.int32, device=device),
    )
    likeliest(logits.to(device), ids, largest, room)
    want_ids = torch.tensor(
        [int(logits[0].argmax()), vocab_size // 3, 0, 0, vocab_size - 1], dtype=torch.int32
    )
    want_largest = logits.float().amax(dim=1)
    want_largest[2] = torch.nan
    finite = [0, 1, 3, 4]
    is_nan = 0.0 if bool(largest[2].isnan()) else torch.inf
    return max(
        exact(ids[finite], want_ids[finite]), exact(largest[finite], want_largest[finite]), is_nan
    )
