"""What makes a prefix what it is: tokens, salt, adapter, and what stands behind single tokens."""

from __future__ import annotations

import itertools

import numpy as np

from inflight.kv_cache import PrefixIdentity
from inflight.kv_cache.identity import block_key
from tests.unit.kv_cache.helpers import extent, make_kv_cache, tokens


def extra(*ids: int) -> PrefixIdentity:
    return PrefixIdentity(extra_ids=np.array(ids, dtype=np.uint64))


def test_a_key_depends_on_tokens_prefix_and_extra_ids() -> None:
    ids, root = tokens(10), PrefixIdentity().root_digest()
    first = block_key(root, ids)
    keys = [
        first,
        block_key(root, tokens(11)),
        block_key(root, ids[:3]),
        block_key(first.digest, ids),
        block_key(root, ids, b"an image"),
    ]
    assert len({key.digest for key in keys}) == len(keys)
    assert (len(first.digest), len(first.token_ids)) == (32, 16)
    assert block_key(root, ids.copy()) == first


def test_every_part_of_an_identity_makes_another_root() -> None:
    identities = [
        PrefixIdentity(),
        PrefixIdentity(cache_salt=""),
        PrefixIdentity(cache_salt="a"),
        PrefixIdentity(cache_salt="\ud800"),
        PrefixIdentity(lora_task_id=0),
        PrefixIdentity(lora_task_id=2**64 - 1),
        PrefixIdentity(cache_salt="a", lora_task_id=0),
    ]
    digests = [identity.root_digest() for identity in identities]
    assert len(set(digests)) == len(digests)
    assert PrefixIdentity(cache_salt="a").root_digest() == digests[2]


def test_requests_of_different_identities_do_not_share() -> None:
    ids = tokens(10, 20, tail=1)
    identities = [
        PrefixIdentity(),
        PrefixIdentity(cache_salt="a"),
        PrefixIdentity(lora_task_id=7),
        extra(5),
    ]
    for first, second in itertools.permutations(identities, 2):
        kv = make_kv_cache(enable_partial_reuse=True)
        kv.open(1, first)
        kv.reserve([extent(1, ids)])
        kv.commit([extent(1, ids)])
        kv.open(2, second)
        assert kv.match_prefix(2, ids).num_tokens == 0
        kv.open(3, first)
        assert kv.match_prefix(3, ids).num_tokens == 8
        kv.check_integrity()


def test_blocks_before_the_first_extra_id_are_shared_and_those_after_it_are_not() -> None:
    kv = make_kv_cache(enable_partial_reuse=True)
    ids = tokens(10, 20, 30, tail=1)
    kv.open(1, extra(0, 0, 0, 0, 0, 6))
    kv.reserve([extent(1, ids)])
    kv.commit([extent(1, ids)])
    for request_id, identity, reusable in (
        (2, PrefixIdentity(), 4),
        (3, extra(0, 0, 0, 0, 0, 6), 12),
        (4, extra(0, 0, 0, 0, 0, 7), 4),
        (5, extra(0, 0, 0, 0, 0, 6, 0, 0, 0), 12),
        (6, extra(0, 0, 0, 0, 0, 6, 0, 0, 1), 8),
    ):
        kv.open(request_id, identity)
        assert kv.match_prefix(request_id, ids).num_tokens == reusable


def test_a_part_with_extra_ids_is_not_kept() -> None:
    kv = make_kv_cache(enable_partial_reuse=True)
    ids = tokens(10, tail=3)
    kv.open(1, extra(0, 0, 0, 0, 6))
    kv.reserve([extent(1, ids)])
    kv.commit([extent(1, ids)])
    kv.close(1)
    kv.check_integrity()
    assert [block.block_id for block in kv._pool.cached_blocks] == [0]
