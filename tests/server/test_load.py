"""Two hundred mixed requests at 32 at once, a fifth of them cancelled midway: all others right."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.server.harness import Client, GrpcStream
from tests.server.reference import Reference

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "The opposite of hot is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a little",
)
NUM_REQUESTS, NUM_CLIENTS = 200, 32


def test_mixed_load_with_cancellations(client: Client, reference: Reference) -> None:
    lengths = {prompt: len(reference.greedy_ids(prompt, 12)) for prompt in PROMPTS}
    wanted = {prompt: reference.greedy(prompt, 12) for prompt in PROMPTS}
    draw = random.Random(7)
    jobs = [(draw.choice(PROMPTS), i % 5 == 0, i % 4) for i in range(NUM_REQUESTS)]
    wrong: list[str] = []
    lock = threading.Lock()

    def one(job: tuple[str, bool, int]) -> None:
        prompt, cancelled, way = job
        ask = {"text_input": prompt, "max_tokens": lengths[prompt]}
        if cancelled:
            leave_midway(client, way, prompt)
            return
        text = answer(client, way, ask)
        if text != wanted[prompt]:
            with lock:
                wrong.append(f"{prompt!r} by way {way}: {text!r} is not {wanted[prompt]!r}")

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(one, jobs))
    assert not wrong, wrong[:5]
    client.wait_for_metric("nv_trt_llm_request_metrics", '"active"', 0)
    client.wait_for_metric("nv_trt_llm_kv_cache_block_metrics", '"used"', 0)


def answer(client: Client, way: int, ask: dict[str, object]) -> str:
    if way == 0:
        return str(client.generate("inflight_llm", **ask)["text_output"])
    if way == 1:
        return "".join(e["text_output"] for e in client.stream("ensemble", stream=True, **ask))
    with GrpcStream(client) as stream:
        stream.ask("inflight_llm" if way == 2 else "ensemble", stream=True, **ask)
        events = stream.events(timeout=120)
    assert events[-1].error is None, events[-1].error
    return "".join(event.text for event in events)


def leave_midway(client: Client, way: int, prompt: str) -> None:
    ask = {"text_input": prompt, "max_tokens": 300, "min_tokens": 300}
    if way % 2 == 0:
        connection = client.open_stream("inflight_llm", **ask)
        connection.recv(400)
        connection.close()
    else:
        stream = GrpcStream(client)
        stream.ask("inflight_llm", stream=True, **ask)
        stream.next(timeout=120)
        stream.close(cancel=True)
