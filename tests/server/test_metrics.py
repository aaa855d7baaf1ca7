"""What /metrics shows: the families that dashboards know, moving as they should."""

from __future__ import annotations

import time

from tests.server.harness import Client

GAUGES = {
    "nv_trt_llm_request_metrics": {"active", "max", "scheduled", "context", "waiting"},
    "nv_trt_llm_runtime_memory_metrics": {"cpu", "gpu", "pinned"},
    "nv_trt_llm_kv_cache_block_metrics": {
        "max", "free", "used", "tokens_per", "reused", "fraction",
    },
    "nv_trt_llm_inflight_batcher_metrics": {
        "total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests",
    },
    "nv_trt_llm_general_metrics": {"timestamp", "iteration_counter"},
    "inflight_batch_fill": {"rows", "tokens"},
    "inflight_iterations_total": {"rows", "tokens", "blocks", "queue"},
    "inflight_kv_tier_used_bytes": {"host", "disk"},
    "inflight_kv_lost_blocks_total": {"dropped", "io_error", "bad_file"},
    "inflight_kv_events_total": {"published", "dropped"},
}  # fmt: skip


def test_known_families_with_their_labels(client: Client) -> None:
    client.generate("inflight_llm", text_input="hello", max_tokens=2)
    time.sleep(0.6)
    seen = client.metrics()
    for family, kinds in GAUGES.items():
        rows = [key for key in seen if key.startswith(family + "{")]
        for kind in kinds:
            named = [row for row in rows if f'"{kind}"' in row]
            assert len(named) == 1, (family, kind, rows)
            assert 'model="inflight_llm"' in named[0] and 'version="1"' in named[0]


def test_tokens_and_latencies_are_counted(client: Client) -> None:
    def snapshot() -> tuple[float, float, float, float]:
        return (
            client.metric("inflight_input_tokens_total"),
            client.metric("inflight_output_tokens_total"),
            client.metric("inflight_time_to_first_token_seconds_count"),
            client.metric("nv_llm_output_token_len_count"),
        )

    client.generate("inflight_llm", text_input="warm", max_tokens=2)
    time.sleep(0.8)
    before = snapshot()
    client.generate("inflight_llm", text_input="The capital of France is", max_tokens=9)
    time.sleep(0.8)
    after = snapshot()
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 9, 1, 1]


def test_blocks_of_the_pool_add_up(client: Client) -> None:
    kinds = {
        kind: client.metric("nv_trt_llm_kv_cache_block_metrics", f'"{kind}"')
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    assert kinds["free"] + kinds["used"] == kinds["max"] > 0
    assert kinds["tokens_per"] == 32
    assert kinds["fraction"] == kinds["used"] / kinds["max"]
