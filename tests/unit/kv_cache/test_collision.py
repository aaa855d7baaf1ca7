"""Blocks of other tokens under one digest: a miss, never the other's KV."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from inflight.api import KvCacheConfig
from inflight.kv_cache import KvCacheManager, identity
from inflight.kv_cache.identity import BlockKey
from inflight.kv_cache.retention import DEFAULT_RETENTION
from tests.unit.kv_cache.helpers import T, extent, make_kv_cache, run, take_all, tokens


@pytest.fixture(autouse=True)
def a_digest_that_sees_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how many there are: all blocks after the same one collide."""

    def weak_key(parent_digest: bytes, token_ids: bytes, extra_ids: bytes) -> BlockKey:
        digest = hashlib.sha256(parent_digest + bytes([len(token_ids)])).digest()
        return BlockKey(digest, parent_digest, token_ids, extra_ids)

    monkeypatch.setattr(identity, "key_of_bytes", weak_key)


def matched(kv: KvCacheManager, request_id: int, token_ids: np.ndarray) -> int:
    kv.open(request_id)
    return kv.match_prefix(request_id, token_ids).num_tokens


def test_who_comes_second_keeps_its_blocks_to_itself() -> None:
    kv = make_kv_cache(enable_partial_reuse=True)
    assert run(kv, 1, tokens(10, 20, tail=1)) == 0
    assert run(kv, 2, tokens(30, 40, tail=1)) == 0
    for request_id in (1, 2):
        kv.close(request_id)
        kv.check_integrity()
    assert matched(kv, 3, tokens(30, 40, tail=1)) == 0
    assert matched(kv, 4, tokens(10, 20, tail=2)) == 9, "whole blocks, and the part after them"
    assert kv._pool.num_empty == 11 - 3, "what could not be filed is not kept either"


def test_a_common_beginning_is_shared_up_to_the_collision() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, tail=1))
    assert run(kv, 2, tokens(10, 30, 40, tail=1)) == 4
    kv.close(2)
    kv.close(1)
    kv.check_integrity()
    assert matched(kv, 3, tokens(10, 30, 40, tail=1)) == 4


def test_the_name_is_free_again_when_its_block_is_evicted() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, tail=1))
    kv.close(1)
    take_all(kv, 2)
    kv.close(2)
    run(kv, 3, tokens(30, tail=1))
    assert matched(kv, 4, tokens(30, tail=1)) == 4 and matched(kv, 5, tokens(10, tail=1)) == 0


def test_a_block_that_comes_from_a_tier_is_left_out() -> None:
    kv = make_kv_cache()
    run(kv, 1, tokens(10, tail=1))
    kv.open(2)
    wanted = tokens(30, 40, tail=1)
    assert len(kv.missing_blocks(2, wanted)) == 2
    assert kv.onboard(2, wanted, [DEFAULT_RETENTION] * 2, lambda block_ids: None) == 0
    kv.check_integrity()
    assert kv.num_free_blocks == 11 - 2 and kv.match_prefix(2, wanted).num_tokens == 0


def test_a_window_goes_on_past_a_block_that_could_not_be_filed() -> None:
    kv = KvCacheManager(11, KvCacheConfig(tokens_per_block=T), window=6)
    ids = {1: tokens(10, 20, 30, 40, 50), 2: tokens(60, 70, 80, 90, 100)}
    for request_id in ids:
        kv.open(request_id)
    for end in range(T, 6 * T, T):
        for request_id, token_ids in ids.items():
            step = [extent(request_id, token_ids, end - T, end)]
            kv.reserve(step)
            kv.commit(step)
            kv.check_integrity()
    for request_id in ids:
        kv.close(request_id)
    kv.check_integrity()
    assert kv.num_free_blocks == 11
    assert matched(kv, 3, np.append(ids[1], 1).astype(np.int32)) == 20
    assert matched(kv, 4, np.append(ids[2], 1).astype(np.int32)) == 0
