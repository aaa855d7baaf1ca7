"""Result files as Markdown: our rows, and those of the first harness."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.compare.table import HEAD, markdown


def row(peer: str, workload: str, walls: list[float], settings: dict[str, Any]) -> dict[str, Any]:
    runs = [{"wall_s": w, "output_tok_s": 100 / w, "total_tok_s": 200 / w} for w in walls]
    times = {"ttft_p50": 0.25, "itl_p50": 0.01, "itl_p99": None}
    return {
        "peer": peer, "label": "", "dtype": "bf16", "workload": workload, "runs": runs,
        "median": runs[0] | times, "settings": settings,
    }  # fmt: skip


def test_workloads_are_in_order_and_ratios_beside_ours() -> None:
    limits = {"limits": {"least_s": 0.5}}
    lines = markdown(
        [
            row("vllm-cpu", "W5", [3.0], {}),
            row("inflight", "W5", [2.0], limits),
            row("inflight", "W1", [1.0, 2.0], limits),
            row("hf-cb", "W1", [4.0, 4.0], {}),
        ]
    )
    assert lines[0] == HEAD
    assert lines[1] == "|---|---|---|---|---|---|---|---|"
    assert lines[2:] == [
        "| W1 | inflight | bf16 | 100.0 (50.0-100.0) | 250 ms | 10 ms / - | 50% |  |",
        "| W1 | hf-cb | bf16 | 25.0 (25.0-25.0) | 250 ms | 10 ms / - |  | 3.00x (2.00-4.00) |",
        "| W5 | vllm-cpu | bf16 | 66.7 (66.7-66.7) | 250 ms | 10 ms / - |  | 1.50x (1.50-1.50) |",
        "| W5 | inflight | bf16 | 100.0 (100.0-100.0) | 250 ms | 10 ms / - | 25% |  |",
    ]
