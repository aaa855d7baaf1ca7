"""HostPool: a place is free again when nobody shows it any more."""

from __future__ import annotations

import gc

from torch import Tensor

from inflight.model.device.host_pool import HostPool


def test_a_place_is_in_use_as_long_as_any_view_of_it() -> None:
    registered = []

    def register(buffer: Tensor) -> bool:
        registered.append(buffer)
        return True

    pool = HostPool(2, 64, register)
    assert [buffer.shape for buffer in registered] == [(2, 64)]
    assert pool.pinned_bytes == 128 and HostPool(2, 64, lambda buffer: False).pinned_bytes == 0
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None and pool.take() is None
    assert first.shape == second.shape == (64,)
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    row = first[8:]
    del first
    gc.collect()
    assert pool.num_free == 0 and (row == 1).all()
    del row
    gc.collect()
    assert pool.num_free == 1
    again = pool.take()
    assert again is not None and (again == 1).all() and (second == 2).all()
