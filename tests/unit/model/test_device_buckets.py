"""For which numbers of rows there are CUDA graphs, and which one an iteration takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from inflight.model.device.buckets import bucket_for, bucket_sizes


@pytest.mark.parametrize(
    ("max_batch_size", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (70, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70)),
    ],
)
def test_sizes_end_with_the_largest_batch(max_batch_size: int, expected: tuple[int, ...]) -> None:
    assert bucket_sizes(max_batch_size) == expected


def test_the_fewest_rows_stay_where_only_some_graphs_may() -> None:
    assert bucket_sizes(64, 3) == (1, 2, 4)
    assert bucket_sizes(4, 9) == (1, 2, 4)


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 64, 65, 255, 256, 1000, 4096])
def test_every_batch_has_the_tightest_bucket_and_little_padding(max_batch_size: int) -> None:
    sizes = bucket_sizes(max_batch_size)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, max_batch_size + 1):
        size = bucket_for(rows, sizes)
        assert size is not None and size >= rows
        assert all(smaller < rows for smaller in sizes if smaller < size)
        assert rows < 9 or size - rows <= max(7, rows // 4)
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_more_rows_than_any_graph_has_none() -> None:
    assert bucket_for(5, (1, 2, 4)) is None
    assert bucket_for(1, ()) is None
