"""A small server: its queue limit, its pool, plain text of its refusals; and another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.harness import Client, Server
from tests.server.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("small")
    checkpoint: Path = make_tiny_checkpoint(folder / "checkpoint")
    running = Server(
        folder / "server.log",
        *("--model", str(checkpoint), "--dtype", "fp32", "--max-batch-size", "2"),
        *("--max-queue-size", "3", "--max-num-tokens", "64", "--tokens-per-block", "16"),
        *("--max-seq-len", "512", "--max-tokens-in-paged-kv-cache", "1024"),
        *("--batch-scheduler-policy", "max_utilization"),
    ).wait_ready()
    yield running.client
    assert running.stop() == 0


def test_another_checkpoint_is_served(small: Client) -> None:
    body = small.generate("inflight_llm", text_input="hello", max_tokens=8, end_id=-1)
    assert body["finish_reason"] == "length"


def test_the_queue_limit_says_so(small: Client) -> None:
    ask = {"text_input": "hello", "max_tokens": 300, "end_id": -1}

    def one(_: int) -> tuple[int, str]:
        status, body = small.call("/v2/models/inflight_llm/generate", ask)
        return status, str(body.get("error", ""))

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, range(24)))
    served = [status for status, _ in answers].count(200)
    refused = [error for status, error in answers if status != 200]
    assert served >= 5 and refused
    assert all("max_queue_size" in error for error in refused), refused[:2]


def test_a_request_beyond_max_seq_len_names_it(small: Client) -> None:
    assert "max_seq_len" in small.refuse("inflight_llm", text_input="hello", max_tokens=600)
