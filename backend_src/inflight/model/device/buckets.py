"""For how many rows CUDA graphs are captured, and which of them an iteration takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_STEPS = ((4, 1), (64, 8), (256, 16))
"""(rows up to which, step): small batches double, and no graph has many more rows than it needs.
Beyond the last the step is ``_LAST_STEP``."""
_LAST_STEP = 64


def bucket_sizes(max_batch_size: int, most: int = 0) -> tuple[int, ...]:
    """Rows that graphs are captured for, ascending: 1, 2, 4, 8, 16, 24, .., the last one
    ``max_batch_size``.

    ``most``: how many graphs at most, those of the fewest rows, which gain most from a graph; 0: as
    many as there are.
    """
    sizes, size = [], 1
    while size < max_batch_size:
        sizes.append(size)
        size = _next_size(size)
    sizes.append(max_batch_size)
    return tuple(sizes[:most] if most else sizes)


def bucket_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) that holds the rows; None: none does."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def _next_size(size: int) -> int:
    if size < _STEPS[0][0]:
        return 2 * size
    step = next((step for limit, step in _STEPS[1:] if size < limit), _LAST_STEP)
    return (size // step + 1) * step
