"""A whole comparison of systems that compute nothing: order, budget, failures, files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.compare import __main__ as main_module
from tests.benchmarks.compare import comparison as comparison_module
from tests.benchmarks.compare.__main__ import parse
from tests.benchmarks.compare.bounds import ModelShape
from tests.benchmarks.compare.comparison import (
    Comparison,
    Plan,
    describe_limits,
    median_limits,
    write_json,
)
from tests.benchmarks.compare.fleet import ROOT, Fleet
from tests.benchmarks.compare.limits import Limits
from tests.benchmarks.compare.systems import System

DRIVER = "tests.fakes.fake_bench_system"
LIMITS = Limits(read_bytes=1e12, fp32_flops=1e12, bf16_flops=1e12, int8_ops=1e12)
SHAPE = ModelShape(
    layer_weights=1000, head_weights=100, num_layers=1, attention_width=8, weight_bytes=2200
)


def plan_of(tmp_path: Path, systems: list[System], **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "checkpoint": tmp_path, "workloads": ["W1"], "systems": systems, "dtype": "bf16",
        "repeat": 2, "budget": 100.0, "threads": 2, "scratch": tmp_path,
    }  # fmt: skip
    return Plan(**values | changes)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(comparison_module, "measure_limits", lambda *_: LIMITS)
    monkeypatch.setattr(ModelShape, "of_checkpoint", staticmethod(lambda *_: SHAPE))
    with Fleet("nowhere", 2, tmp_path, turn_seconds=30, say=lambda line: None) as made:
        yield made


def turns_of(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith(("W1 1/", "W1 2/", "W1 3/"))]


def test_systems_take_turns_within_each_repeat(
    tmp_path: Path, fleet: Fleet, said: list[str]
) -> None:
    systems = [System("inflight", DRIVER, "ok"), System("hf-cb", DRIVER, "ok", door="b")]
    comparison = Comparison(plan_of(tmp_path, systems), fleet, said.append)
    comparison.run_workload("W1")
    assert turns_of(said) == [
        "W1 1/2 inflight: 2.00 s",  # call 1 of the process warmed it up
        "W1 1/2 hf-cb: 4.00 s",  # and call 3 the other door
        "W1 2/2 inflight: 5.00 s",
        "W1 2/2 hf-cb: 6.00 s",
    ]
    assert [r["peer"] for r in comparison.rows] == ["inflight", "hf-cb"]
    assert [run["wall_s"] for run in comparison.rows[0]["runs"]] == [2.0, 5.0]
    assert comparison.rows[0]["settings"]["limits"]["bf16_flops"] == 1e12
    assert any("2.00x" in line or "1.60x" in line for line in said), "a ratio is printed"


def test_a_slow_system_gets_no_repeat_beyond_its_budget(
    tmp_path: Path, fleet: Fleet, said: list[str]
) -> None:
    plan = plan_of(tmp_path, [System("inflight", DRIVER, "ok")], repeat=3, budget=4.0)
    comparison = Comparison(plan, fleet, said.append)
    comparison.run_workload("W1")
    assert len(comparison.rows[0]["runs"]) == 2, "2 s and 3 s are more than 4 s"


def test_a_system_that_fails_is_left_out_and_told(
    tmp_path: Path, fleet: Fleet, said: list[str]
) -> None:
    systems = [System("inflight", DRIVER, "ok"), System("hf-cb", DRIVER, "no-serve")]
    comparison = Comparison(plan_of(tmp_path, systems), fleet, said.append)
    comparison.run_workload("W1")
    assert [r["peer"] for r in comparison.rows] == ["inflight"]
    (failure,) = comparison.failures
    assert failure.startswith("W1: hf-cb: ValueError: cannot serve;")


def test_nobody_left_is_no_table(tmp_path: Path, fleet: Fleet, said: list[str]) -> None:
    plan = plan_of(tmp_path, [System("hf-cb", DRIVER, "no-load")])
    comparison = Comparison(plan, fleet, said.append)
    comparison.run_workload("W1")
    assert comparison.rows == []
    assert not any("tokens/s" in line for line in said)


def test_limits_of_a_workload_are_medians_and_their_range_is_told() -> None:
    rates = [Limits(read * 1e9, 2e9, 3e9, 4e9) for read in (30.0, 50.0, 40.0)]
    assert median_limits(rates).read_bytes == 40e9
    assert describe_limits(rates) == (
        "machine: reads 40.0 GB/s (30.0-50.0), multiplies fp32 2, bf16 3, int8 4 Gop/s"
    )


def test_the_result_is_one_json_list_and_replaces_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "results" / "file.json"
    write_json([{"peer": "a"}], target)
    write_json([{"peer": "b"}], target)
    assert json.loads(target.read_text()) == [{"peer": "b"}]
    assert [path.name for path in target.parent.iterdir()] == ["file.json"]


def test_options_have_defaults() -> None:
    asked = parse([])
    assert (asked.peers, asked.dtype, asked.repeat) == ("none", "bf16", 3)
    assert (asked.json, asked.png) == (Path("results/bench.json"), Path("results/bench.png"))
    assert asked.workloads == ["W1", "W2c8", "W2c32", "W3", "W4", "W4off", "W5"]
    assert parse(["--workloads", "W3,W1"]).workloads == ["W3", "W1"]


def test_rows_and_picture_are_written_and_told(
    tmp_path: Path,
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(main_module, "Fleet", lambda *_, **__: nullcontext(fleet))
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, [System("inflight", DRIVER, "ok")], repeat=1)
    assert main_module.compare(parse([]), plan) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["rows: results/bench.json", "picture: results/bench.png"]
    assert json.loads((tmp_path / "results/bench.json").read_text())[0]["peer"] == "inflight"
    assert (tmp_path / "results/bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "W1,W9"], "W9: not one of W1"),
        (["--repeat", "0"], "must be 1 or larger"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_a_named_peer_that_is_missing_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.compare", "--peers", "vllm"],
        cwd=ROOT,
        env={"PEERS_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: vllm: no environment below")
    assert done.stderr.count("\n") == 1
