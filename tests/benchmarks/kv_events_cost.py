"""What KV events cost the engine's thread: python tests/benchmarks/kv_events_cost.py

The same requests run through the KV cache's books, in turns without an observer and with the
publisher of events, a subscriber attached. Every request fills blocks and evicts others', so each
block is one event stored and one removed. Printed are the least microseconds of a block, and the
share that this is of an iteration: one that generates for 64 requests fills two blocks of 32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import zmq

from inflight.api import KvCacheConfig, KvEventsConfig
from inflight.kv_cache import BlockObserver, KvCacheManager, KvExtent
from inflight.kv_events import make_publisher

TOKENS_PER_BLOCK, NUM_BLOCKS, PROMPT_LENGTH, NUM_REQUESTS = 32, 128, 1024, 64
BLOCKS_OF_AN_ITERATION = 2


def seconds_per_block(observers: Sequence[BlockObserver]) -> float:
    config = KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK)
    kv = KvCacheManager(NUM_BLOCKS, config, observers=observers)
    prompts = np.random.default_rng(0).integers(
        0, 50_000, size=(NUM_REQUESTS, PROMPT_LENGTH), dtype=np.int32
    )
    began = time.perf_counter()
    for request_id, prompt in enumerate(prompts):
        extent = KvExtent(request_id, 0, prompt)
        kv.open(request_id)
        kv.reserve([extent])
        kv.commit([extent])
        kv.close(request_id)
    return (time.perf_counter() - began) / (NUM_REQUESTS * PROMPT_LENGTH // TOKENS_PER_BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--iteration-ms", type=float, default=20.0, help="to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        config = KvEventsConfig(endpoint=f"ipc://{folder}/e", replay_endpoint=f"ipc://{folder}/r")
        publisher = make_publisher(config, TOKENS_PER_BLOCK)
        publisher.start()
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(config.endpoint)
            without = published = float("inf")
            for _ in range(options.turns):
                without = min(without, seconds_per_block([]))
                published = min(published, seconds_per_block([publisher.observer()]))
                time.sleep(0.1)  # the publisher catches up
        stats = publisher.stats()
        publisher.close()
    extra = published - without
    share = extra * BLOCKS_OF_AN_ITERATION / (options.iteration_ms / 1000)
    print(f"a block: {without * 1e6:.1f} us, with events {published * 1e6:.1f} us")
    print(f"of an iteration of {options.iteration_ms:g} ms: {share:.4%}")
    print(f"{stats.num_published_events} events, {stats.num_dropped_events} dropped")


if __name__ == "__main__":
    main()
