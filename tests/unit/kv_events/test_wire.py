"""The bytes of a message, written out by hand from the description of vLLM's KV events."""

from __future__ import annotations

import msgpack
import pytest

from inflight.api.kv_events import KvEventFormat
from inflight.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheGroup,
    KvEvent,
    encode_batch,
)

STORED = BlockStored((1, 2**64 - 1), None, (5, 6, 7, 300), 2, "GPU")
CHILD = BlockStored((3,), 1, (9, 70_000), 2, "CPU")
REMOVED = BlockRemoved((1,), "GPU")
CLEARED = AllBlocksCleared()
FULL, WINDOW = CacheGroup(0, None), CacheGroup(1, 512)
IN_FULL = STORED._replace(group=FULL)
IN_WINDOW = CHILD._replace(group=WINDOW)
GONE_FROM_WINDOW = REMOVED._replace(group=WINDOW)

# msgpack: 93 = array of 3, cb = float64, 88 = map of 8, aN = string of N bytes, cf = uint64,
# cd = uint16, ce = uint32, c0 = nil, 8c = map of 12, 9c = array of 12.
HEAD = bytes.fromhex("93 cb 3ff8000000000000 91")  # [1.5, [one event], ...
RANK = b"\x00"

MAPS = {
    STORED: b"\x88"
    b"\xa4type\xabBlockStored"
    b"\xacblock_hashes\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
    b"\xb1parent_block_hash\xc0"
    b"\xa9token_ids\x94\x05\x06\x07\xcd\x01\x2c"
    b"\xaablock_size\x02"
    b"\xa7lora_id\xc0"
    b"\xa6medium\xa3GPU"
    b"\xa9lora_name\xc0",
    REMOVED: b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xa6medium\xa3GPU",
    CLEARED: b"\x81\xa4type\xb0AllBlocksCleared",
    IN_FULL: b"\x8c"
    b"\xa4type\xabBlockStored"
    b"\xacblock_hashes\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
    b"\xb1parent_block_hash\xc0"
    b"\xa9token_ids\x94\x05\x06\x07\xcd\x01\x2c"
    b"\xaablock_size\x02"
    b"\xa7lora_id\xc0"
    b"\xa6medium\xa3GPU"
    b"\xa9lora_name\xc0"
    b"\xaaextra_keys\xc0"
    b"\xa9group_idx\x00"
    b"\xb2kv_cache_spec_kind\xaefull_attention"
    b"\xbckv_cache_spec_sliding_window\xc0",
    GONE_FROM_WINDOW: b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xa6medium\xa3GPU"
    b"\xa9group_idx\x01",
}
ARRAYS = {
    STORED: b"\x98\xabBlockStored\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0"
    b"\x94\x05\x06\x07\xcd\x01\x2c\x02\xc0\xa3GPU\xc0",
    CHILD: b"\x98\xabBlockStored\x91\x03\x01\x92\x09\xce\x00\x01\x11\x70\x02\xc0\xa3CPU\xc0",
    REMOVED: b"\x93\xacBlockRemoved\x91\x01\xa3GPU",
    CLEARED: b"\x91\xb0AllBlocksCleared",
    IN_WINDOW: b"\x9c\xabBlockStored\x91\x03\x01\x92\x09\xce\x00\x01\x11\x70\x02\xc0\xa3CPU\xc0"
    b"\xc0\x01\xaesliding_window\xcd\x02\x00",
    GONE_FROM_WINDOW: b"\x94\xacBlockRemoved\x91\x01\xa3GPU\x01",
}


@pytest.mark.parametrize("event", MAPS, ids=lambda e: f"{type(e).__name__}-{len(e.fields())}")
def test_golden_bytes_of_maps(event: KvEvent) -> None:
    assert encode_batch(1.5, [event], KvEventFormat.MAP) == HEAD + MAPS[event] + RANK


@pytest.mark.parametrize("event", ARRAYS, ids=lambda e: f"{type(e).__name__}-{len(e.fields())}")
def test_golden_bytes_of_arrays(event: KvEvent) -> None:
    assert encode_batch(1.5, [event], KvEventFormat.ARRAY) == HEAD + ARRAYS[event] + RANK


@pytest.mark.parametrize("event_format", KvEventFormat)
def test_a_batch_is_an_array_of_three_with_its_events_in_order(event_format: KvEventFormat) -> None:
    batch = msgpack.unpackb(encode_batch(2.0, [CLEARED, STORED, REMOVED], event_format))
    seconds, events, rank = batch
    assert (seconds, rank) == (2.0, 0)
    names = [e["type"] if event_format is KvEventFormat.MAP else e[0] for e in events]
    assert names == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]


def test_hashes_are_integers_over_the_whole_range() -> None:
    batch = msgpack.unpackb(encode_batch(0.0, [STORED], KvEventFormat.MAP))
    assert batch[1][0]["block_hashes"] == [1, 2**64 - 1]
