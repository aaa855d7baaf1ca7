"""Launch: how a kernel is cut into programs; and what is used where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Sizes of a program's tile, and what the compiler makes of its loop. Tiles are powers of 2."""

    rows: int
    """Rows that a program computes at least; a row is one query head of one token."""
    columns: int
    """Keys that it takes at a time."""
    num_warps: int
    num_stages: int
    """Iterations of the loop whose loads are under way together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunches:
    """Those of attention: for rows of contexts, and for generations."""

    context: Launch
    generation: Launch
    programs_per_multiprocessor: int = 4
    """Generations are split until there are so many."""


def default_launches(head_dim: int, dtype: torch.dtype) -> AttentionLaunches:
    """Tiles that fit into the shared memory of any card since compute capability 8.0 (99 KiB)."""
    if dtype is torch.float32:
        # No tensor core multiplies them as they are: larger tiles fill more than the registers.
        columns = 32 if head_dim <= 128 else 16
        return AttentionLaunches(
            context=Launch(rows=32, columns=columns, num_warps=4, num_stages=1),
            generation=Launch(rows=16, columns=columns, num_warps=4, num_stages=2),
        )
    if head_dim <= 128:
        return AttentionLaunches(
            context=Launch(rows=128, columns=64, num_warps=8, num_stages=2),
            generation=Launch(rows=16, columns=64, num_warps=4, num_stages=2),
        )
    return AttentionLaunches(
        context=Launch(rows=64, columns=32, num_warps=4, num_stages=2),
        generation=Launch(rows=16, columns=32, num_warps=4, num_stages=2),
    )


def multiprocessors(device: torch.device) -> int:
    """Of the card; a CPU, where programs run one after the other, counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
