"""Books that were spoiled on purpose: the check says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inflight.errors import IntegrityError
from inflight.kv_cache import KvCacheManager
from inflight.kv_cache.block import Block
from inflight.kv_cache.radix_tree import Node, Root
from tests.unit.kv_cache.helpers import extent, make_kv_cache, run, table, tokens


def make_busy_cache() -> KvCacheManager:
    """Request 1 holds 0 1 2, shares 0 1 with request 2 (0 1 3); 4 is 5's copy; 6 7 are cached."""
    kv = make_kv_cache()
    run(kv, 1, tokens(10, 20, tail=1))
    run(kv, 2, tokens(10, 20, tail=2))
    twins = [extent(3, tokens(50)), extent(4, tokens(50))]
    kv.open(3)
    kv.open(4)
    kv.reserve(twins)
    kv.commit(twins)
    run(kv, 5, tokens(60, 70))
    kv.close(5)
    kv.check_integrity()
    assert [table(kv, i) for i in (1, 2, 3, 4)] == [[0, 1, 2], [0, 1, 3], [4], [5]]
    assert [block.block_id for block in kv._pool.cached_blocks] == [7, 6]
    return kv


def node_of(kv: KvCacheManager, block_id: int) -> Node:
    node = kv._pool.blocks[block_id].node
    assert node is not None
    return node


def lose_a_reference(kv: KvCacheManager) -> None:
    kv._pool.blocks[0].ref_count -= 1


def forget_a_request(kv: KvCacheManager) -> None:
    del kv._sequences[2]


def lose_an_empty_block(kv: KvCacheManager) -> None:
    kv._pool._empty.pop()


def free_a_block_twice(kv: KvCacheManager) -> None:
    kv._pool._empty.append(kv._pool._empty[0])


def free_a_held_block(kv: KvCacheManager) -> None:
    kv._pool._empty.append(kv._pool.blocks[2])


def free_a_block_of_another_pool(kv: KvCacheManager) -> None:
    kv._pool._empty.append(Block(3))


def lose_a_cached_block(kv: KvCacheManager) -> None:
    kv._pool._cached.remove(kv._pool.blocks[7])


def cache_an_unknown_block(kv: KvCacheManager) -> None:
    kv._pool._cached._tickets[kv._pool._empty.pop()] = 1000


def leave_a_place_to_an_empty_block(kv: KvCacheManager) -> None:
    kv._pool._empty[0].node = node_of(kv, 6)


def lose_a_leaf(kv: KvCacheManager) -> None:
    kv._pool._cached._leaves.clear()


def cache_a_prefix_of_what_is_held(kv: KvCacheManager) -> None:
    kv._pool.blocks[7].ref_count = 1
    kv._pool._cached.remove(kv._pool.blocks[7])


def disorder_the_parts(kv: KvCacheManager) -> None:
    node = node_of(kv, 0)
    assert isinstance(node.parent, Root)
    node.parent.parts.reverse()


def file_a_root_wrongly(kv: KvCacheManager) -> None:
    kv._tree._roots[b"wrong"] = Root(b"other")


def have_something_after_a_part(kv: KvCacheManager) -> None:
    kv._tree._full_size += 4


def keep_the_source_of_a_copy(kv: KvCacheManager) -> None:
    kv._pool.share(kv._pool.blocks[0])
    kv._sequences[3].copy_source = kv._pool.blocks[0]


def detach_a_block(kv: KvCacheManager) -> None:
    kv._tree.remove(node_of(kv, 7))


def file_under_a_wrong_digest(kv: KvCacheManager) -> None:
    children = node_of(kv, 0).children
    children[b"wrong"] = children.pop(node_of(kv, 1).key.digest)


def file_a_first_block_wrongly(kv: KvCacheManager) -> None:
    node_of(kv, 0).parent = node_of(kv, 6)


def point_two_nodes_at_one_block(kv: KvCacheManager) -> None:
    node_of(kv, 6).block = kv._pool.blocks[7]


def share_a_block_at_another_place(kv: KvCacheManager) -> None:
    copy = node_of(kv, 4).copies[0]
    kv._sequences[1].append(copy)
    copy.ref_count += 1


def share_what_nobody_has_written(kv: KvCacheManager) -> None:
    block = kv._pool.allocate()
    kv._pool.share(block)
    kv._sequences[3].append(block)
    kv._sequences[4].append(block)


def hold_a_copy_by_nobody(kv: KvCacheManager) -> None:
    node_of(kv, 4).copies[0].ref_count = 0


def put_a_copy_above_its_cached_twin(kv: KvCacheManager) -> None:
    kv._sequences[3].clear()
    kv._pool.blocks[4].ref_count = 0
    kv._pool._cached.add(kv._pool.blocks[4])


def change_a_table(kv: KvCacheManager) -> None:
    kv._sequences[1]._table[1] = 9


def hold_a_block_twice(kv: KvCacheManager) -> None:
    block = kv._sequences[3].blocks[0]
    kv._sequences[3].append(block)
    block.ref_count += 1


def hold_a_block_of_another_pool(kv: KvCacheManager) -> None:
    kv._sequences[1].append(Block(10))


def commit_what_is_not_written(kv: KvCacheManager) -> None:
    kv._sequences[3].history_length = 3


def write_past_the_end(kv: KvCacheManager) -> None:
    kv._sequences[1].history_length = 13


def forget_a_commit(kv: KvCacheManager) -> None:
    kv._sequences[3].num_committed_blocks = 0


def commit_without_a_key(kv: KvCacheManager) -> None:
    kv._sequences[1]._keys.pop()


def take_other_content_for_its_own(kv: KvCacheManager) -> None:
    kv._sequences[3]._keys[0] = kv._sequences[3]._keys[0]._replace(token_ids=b"other")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lose_a_reference, "block 0 has 1 references and is in 2 tables"),
        (forget_a_request, "block 3 has 1 references and is in 0 tables"),
        (lose_an_empty_block, "with 0 references is 0 times among the free"),
        (free_a_block_twice, "is 2 times among the free"),
        (free_a_held_block, "block 2 with 1 references is 1 times among the free"),
        (free_a_block_of_another_pool, "do not make 11"),
        (lose_a_cached_block, "block 7 with 0 references is 0 times among the free"),
        (cache_an_unknown_block, "is cached and no match finds it"),
        (leave_a_place_to_an_empty_block, "is empty and has a place in the tree"),
        (lose_a_leaf, "block 7 is cached, and eviction takes it for no leaf"),
        (cache_a_prefix_of_what_is_held, "block 7 is held and block 6 before it is not"),
        (disorder_the_parts, "the order of a node's children is wrong"),
        (file_a_root_wrongly, "a root without children, or filed wrongly"),
        (have_something_after_a_part, "block 0 is not full, and something comes after it"),
        (keep_the_source_of_a_copy, "request 3: the source of a copy is held"),
        (detach_a_block, "block 7 is 0 times in the tree"),
        (file_under_a_wrong_digest, "block 1 is filed wrongly"),
        (file_a_first_block_wrongly, "block 0 is filed wrongly"),
        (point_two_nodes_at_one_block, "block 7 or a copy of it has another place"),
        (share_a_block_at_another_place, "block 5 has two places in the tables"),
        (share_what_nobody_has_written, "request 3: block 8 is shared, unwritten"),
        (hold_a_copy_by_nobody, "a copy of block 4 is held by nobody"),
        (put_a_copy_above_its_cached_twin, "block 4 is cached although a copy of it is held"),
        (change_a_table, "request 1: the table differs"),
        (hold_a_block_twice, "request 3: a block is twice in the table"),
        (hold_a_block_of_another_pool, "a table has a block of no pool"),
        (commit_what_is_not_written, "request 3: 4 committed, 3 written"),
        (write_past_the_end, "13 written, room for 12"),
        (forget_a_commit, "request 3: block 4 is not committed, yet known"),
        (commit_without_a_key, "request 1: committed blocks without a key"),
        (take_other_content_for_its_own, "request 3: block 4 has a wrong place in the tree"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_spoiled_books_are_found(spoil: Callable[[KvCacheManager], None], complaint: str) -> None:
    kv = make_busy_cache()
    spoil(kv)
    with pytest.raises(IntegrityError) as caught:
        kv.check_integrity()
    assert complaint in str(caught.value)


def test_a_report_stays_short() -> None:
    kv = make_kv_cache(1000)
    kv._pool._empty.clear()
    with pytest.raises(IntegrityError) as caught:
        kv.check_integrity()
    assert str(caught.value).count(";") == 4
