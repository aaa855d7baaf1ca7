"""A server that ends in order leaves the KV of its pool to the next one."""

from __future__ import annotations

from pathlib import Path

from tests.server.harness import Server
from tests.server.tiny_checkpoint import make_tiny_checkpoint

PROMPT = "0123456789abcdef" * 8
"""One token a byte: four blocks of 32, of which the last is computed again."""


def test_a_restarted_server_finds_the_kv_that_its_pool_held(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny")
    answers, onboarded = [], []
    for life in ("first", "second"):
        server = Server(
            tmp_path / f"{life}.log",
            *("--model", str(checkpoint), "--dtype", "fp32"),
            *("--kv-cache-disk-bytes", "100000000", "--kv-cache-disk-path", str(tmp_path)),
            *("--kv-cache-disk-persist", "true"),
        )
        try:
            client = server.wait_ready().client
            # The second life has measured nothing yet, and tries what it finds.
            answers.append(client.generate("inflight_llm", text_input=PROMPT, max_tokens=8))
            client.wait_for_metric("inflight_requests_total", '"length"', 1)
            onboarded.append(client.metric("inflight_kv_onboarded_bytes_total", '"disk"'))
        finally:
            server.stop()
    assert answers[0]["text_output"] == answers[1]["text_output"] != ""
    assert onboarded[0] == 0 and onboarded[1] > 0
    assert "stay on disk" in (tmp_path / "first.log").read_text()
