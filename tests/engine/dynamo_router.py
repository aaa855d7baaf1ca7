"""NVIDIA Dynamo's router beside one engine, as a program of its own.

Its arguments are the block size and the two endpoints of the events. Each line it reads is a JSON
list of token ids; each line it writes is the JSON of how many of their blocks Dynamo believes to be
cached: on the device, and with the host's memory counted in.
"""

from __future__ import annotations

import asyncio
import json
import sys

import dynamo._core as dynamo  # type: ignore[import-not-found]


async def main(block_size: str, endpoint: str, replay_endpoint: str) -> None:
    service = dynamo.SelectionService(indexer_threads=1)
    worker = {
        "worker_id": 1,
        "model_name": "model",
        "endpoint": "http://127.0.0.1:1",  # nothing is sent to it
        "block_size": int(block_size),
        "kv_events_endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "total_kv_blocks": 1000,
        "max_num_batched_tokens": 2048,
    }
    await service.upsert_worker(worker)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        query = {"model_name": "model", "token_ids": json.loads(line)}
        (scores,) = (await service.overlap_scores(query))["workers"]
        print(json.dumps([scores["device_blocks"], scores["host_pinned_blocks"]]), flush=True)


asyncio.run(main(*sys.argv[1:]))
