"""HostStorage: what it gives back, and what it gives up."""

from __future__ import annotations

import numpy as np

from inflight.kv_cache.identity import BlockKey, block_key
from inflight.kv_cache.tiers.host import HostStorage
from inflight.kv_cache.tiers.storage import TierBlock
from tests.unit.kv_cache.tiers.tier_blocks import BLOCK_BYTES, tier_block


def test_what_was_put_comes_back_byte_for_byte() -> None:
    storage = HostStorage(2 * BLOCK_BYTES)
    block = tier_block(1)
    assert list(storage.put(block)) == []
    found = storage.get(block.key)
    assert found is not None and found.content.tobytes() == block.content.tobytes()
    assert storage.get(tier_block(2).key) is None
    assert storage.usage == (1, BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_the_block_used_longest_ago_is_given_up_by_bytes() -> None:
    storage = HostStorage(3 * BLOCK_BYTES - 1)
    first, second, third = (tier_block(n) for n in range(3))
    storage.put(first)
    storage.put(second)
    storage.get(first.key)
    assert list(storage.put(third)) == [second]
    assert storage.contains(first.key) and not storage.contains(second.key)
    assert storage.usage.used_bytes == 2 * BLOCK_BYTES
    assert [block.key for block in storage.most_valuable_first()] == [third.key, first.key]


def test_what_another_follows_goes_after_it_and_then_at_its_age() -> None:
    storage = HostStorage(3 * BLOCK_BYTES)
    first = tier_block(0)
    following = TierBlock(block_key(first.key.digest, np.arange(4, dtype=np.int32)), first.content)
    for block in (following, first, tier_block(1)):  # as they are evicted: the last one first
        assert list(storage.put(block)) == []
    later = [tier_block(number) for number in (2, 3, 4)]
    given_up = [block.key for new in later for block in storage.put(new)]
    assert given_up == [following.key, first.key, tier_block(1).key]


def test_a_block_larger_than_the_tier_goes_on_to_the_next() -> None:
    storage = HostStorage(BLOCK_BYTES - 1)
    block = tier_block(1)
    assert list(storage.put(block)) == [block]
    assert storage.usage.num_blocks == 0


def test_equal_digests_of_other_tokens_are_a_miss_and_the_newer_one_stays() -> None:
    storage = HostStorage(3 * BLOCK_BYTES)
    block, other = tier_block(1), tier_block(2)
    key = BlockKey(block.key.digest, block.key.parent_digest, other.key.token_ids)
    forged = TierBlock(key, other.content)
    storage.put(block)
    assert storage.get(forged.key) is None
    storage.put(forged)
    assert storage.get(block.key) is None and storage.get(forged.key) == forged
    assert storage.usage.used_bytes == BLOCK_BYTES


def test_another_salt_is_another_block() -> None:
    storage = HostStorage(3 * BLOCK_BYTES)
    storage.put(tier_block(1, salt="a"))
    assert storage.get(tier_block(1, salt="b").key) is None
    assert storage.get(tier_block(1).key) is None


def test_removing_gives_the_bytes_back() -> None:
    storage = HostStorage(BLOCK_BYTES)
    storage.put(tier_block(1))
    storage.remove(tier_block(2).key)
    storage.remove(tier_block(1).key)
    assert storage.usage == (0, 0, BLOCK_BYTES)
