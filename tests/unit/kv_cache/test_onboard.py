"""missing_blocks and onboard: what may come from elsewhere, and how it enters the books."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api.executor_config import KvCacheConfig
from inflight.kv_cache import KvExtent
from inflight.kv_cache.manager import KvCacheManager
from inflight.kv_cache.retention import DEFAULT_RETENTION

TOKENS = np.arange(14, dtype=np.int32)
KEPT = [DEFAULT_RETENTION]


def make_kv(num_blocks: int, *, reuse: bool = True) -> KvCacheManager:
    config = KvCacheConfig(tokens_per_block=4, num_blocks=num_blocks, enable_block_reuse=reuse)
    return KvCacheManager(num_blocks, config)


def compute(kv: KvCacheManager, request_id: int, tokens: npt.NDArray[np.int32]) -> None:
    """Opens a request, computes it, and closes it: its blocks are cached."""
    kv.open(request_id)
    kv.reserve([KvExtent(request_id, 0, tokens)])
    kv.commit([KvExtent(request_id, 0, tokens)])
    kv.close(request_id)


def ignore(block_ids: npt.NDArray[np.int32]) -> None:
    """Writes nothing: only the books are looked at."""


def test_whole_blocks_after_the_cached_ones_are_missing() -> None:
    kv = make_kv(8)
    kv.open(1)
    assert [len(key.token_ids) for key in kv.missing_blocks(1, TOKENS)] == [16, 16, 16]
    assert len(kv.missing_blocks(1, TOKENS[:12])) == 2, "one token is left to compute"
    compute(kv, 2, TOKENS[:4])
    missing = kv.missing_blocks(1, TOKENS)
    assert [key.token_ids for key in missing] == [TOKENS[4:8].tobytes(), TOKENS[8:12].tobytes()]


def test_without_reuse_nothing_is_missing() -> None:
    kv = make_kv(8, reuse=False)
    kv.open(1)
    assert list(kv.missing_blocks(1, TOKENS)) == []


def test_onboarded_blocks_are_cached_and_match() -> None:
    kv = make_kv(8)
    compute(kv, 2, TOKENS[:4])
    kv.open(1)
    written: list[int] = []
    assert kv.onboard(1, TOKENS, 2 * KEPT, lambda ids: written.extend(ids.tolist())) == 2
    kv.check_integrity()
    assert kv.num_free_blocks == 8, "nobody holds them"
    assert kv.match_prefix(1, TOKENS).num_tokens == 12
    kv.reserve([KvExtent(1, 12, TOKENS)])
    assert kv.block_table(1)[1:3].tolist() == written
    kv.check_integrity()


def test_onboarding_never_evicts_the_prefix_that_it_continues() -> None:
    kv = make_kv(3)
    compute(kv, 2, TOKENS[:4])
    compute(kv, 3, TOKENS[::-1].copy()[:8])
    kv.open(1)
    assert kv.onboard(1, TOKENS, 2 * KEPT, ignore) == 2
    kv.check_integrity()
    assert kv.match_prefix(1, TOKENS).num_tokens == 12


def test_only_as_many_come_as_there_is_room_for() -> None:
    kv = make_kv(4)
    kv.open(9)
    kv.reserve([KvExtent(9, 0, TOKENS[:8] + 100)])
    kv.open(1)
    counts: list[int] = []
    assert kv.onboard(1, TOKENS, 3 * KEPT, lambda ids: counts.append(len(ids))) == 2
    assert counts == [2]
    kv.check_integrity()
    assert kv.match_prefix(1, TOKENS).num_tokens == 8


def test_blocks_that_could_not_be_written_are_not_in_the_cache() -> None:
    kv = make_kv(4)
    kv.open(1)

    def fail(block_ids: npt.NDArray[np.int32]) -> None:
        raise OSError("no")

    with pytest.raises(OSError):
        kv.onboard(1, TOKENS, 3 * KEPT, fail)
    kv.check_integrity()
    assert kv.match_prefix(1, TOKENS).num_tokens == 0
    assert kv.num_free_blocks == 4


def test_nothing_to_onboard_writes_nothing() -> None:
    kv = make_kv(8)
    compute(kv, 2, TOKENS)
    kv.open(1)

    def never(block_ids: npt.NDArray[np.int32]) -> None:
        raise AssertionError

    assert kv.onboard(1, TOKENS, 3 * KEPT, never) == 0
