"""``inflight simulate`` and ``inflight plan`` as a user types them, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inflight.cli import main
from inflight.simulator import picture, planner
from inflight.simulator.calibration_file import Calibration, save_calibration
from inflight.simulator.example import EXAMPLE_COST

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
TRACE = "arrival,input_length,output_length\n0,40,8\n0.1,30,12\n0.2,3000,5\n"


@pytest.fixture(name="files")
def make_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model's config.json, a trace and a cost model; it is the working one."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "trace.csv").write_text(TRACE)
    save_calibration(tmp_path / "cost.json", Calibration(EXAMPLE_COST))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, list(arguments))


def answer(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code != 0 and result.exception is not None
    return str(result.exception) if result.exit_code == 1 else result.output


SIMULATE = ("simulate", "trace.csv", "--model", "config.json", "--cost", "cost.json")


def test_a_trace_as_json(files: Path) -> None:
    facts = answer(*SIMULATE, "--num-blocks", "50", "--max-batch-size", "8")
    assert facts["iterations_per_minute"] > 0
    assert (facts["num_requests"], facts["num_blocks"]) == (3, 50)
    assert list(facts["policies"]) == ["guaranteed_no_evict", "max_utilization"]
    for policy in facts["policies"].values():
        assert (policy["num_completed"], policy["num_refused"]) == (2, 1)
        assert policy["num_generated_tokens"] == 20
        assert set(policy["time_to_first_token"]) == {"p50", "p90", "p99"}
        assert policy["num_pauses"] == 0
        assert 0 < policy["batch_fill"] <= 2 / 8


def test_a_trace_as_text(files: Path) -> None:
    result = run(*SIMULATE, "--num-blocks", "50")
    assert result.exit_code == 0, result.output
    for name in ("batch fill", "KV blocks in use", "waste", "pauses", "first token p99"):
        assert name in result.stdout
    assert "1 requests were refused; the first: input_ids: '3000 tokens'" in result.stdout
    assert " a minute" in result.stdout


def test_the_pool_comes_from_memory_as_the_engine_counts_it(files: Path) -> None:
    """2 layers, K and V, 64 channels in bf16: 512 bytes a token, 16,384 a block of 32."""
    weights = 2 * (2 * 64 * 16 * 8 + 3 * 64 * 128) + 2 * 1000 * 64
    gib = (2 * weights + 100 * 16_384 / 0.5) / 2**30
    fraction = ("--kv-cache-free-gpu-mem-fraction", "0.5")
    assert answer(*SIMULATE, "--memory", f"{gib + 1e-6:.9f}", *fraction)["num_blocks"] == 100
    tokens = ("--max-tokens-in-paged-kv-cache", "640")
    assert answer(*SIMULATE, "--memory", "1", *tokens)["num_blocks"] == 20


def test_only_the_policy_that_is_configured_is_simulated(files: Path) -> None:
    only = ("--num-blocks", "50", "--batch-scheduler-policy", "static_batch")
    assert list(answer(*SIMULATE, *only)["policies"]) == ["static_batch"]


def test_the_example_says_how_fast_it_ran(files: Path) -> None:
    facts = answer("simulate", "--example", "--requests", "30")
    assert facts["num_requests"] == 30
    assert facts["iterations_per_minute"] > 0
    assert facts["policies"]["max_utilization"]["num_completed"] == 30


def test_requests_and_speed(files: Path) -> None:
    slow = answer(*SIMULATE, "--num-blocks", "50", "--requests", "2", "--speed", "0.001")
    assert slow["num_requests"] == 2
    assert slow["policies"]["guaranteed_no_evict"]["simulated_seconds"] > 100


def test_the_derived_cost_needs_no_file(files: Path) -> None:
    facts = answer(*SIMULATE[:4], "--num-blocks", "50", "--flops", "1", "--bandwidth", "50")
    times = facts["policies"]["guaranteed_no_evict"]["inter_token"]
    weights = 2 * (2 * (2 * 64 * 16 * 8 + 3 * 64 * 128) + 2 * 1000 * 64)
    assert times["p50"] == pytest.approx(weights / 50e9, rel=0.2)


TIERS = ("--kv-cache-host-memory-bytes", "100000", "--kv-cache-disk-bytes", "1000000")


def test_tiers_are_named_like_their_keys_and_need_no_folder(files: Path) -> None:
    speeds = ("--kv-cache-host-bandwidth", "3", "--kv-cache-disk-bandwidth", "1")
    facts = answer(*SIMULATE, "--num-blocks", "20", *TIERS, *speeds)
    for policy in facts["policies"].values():
        host, disk = policy["tiers"]
        assert (host["max_bytes"], disk["max_bytes"]) == (100_000, 1_000_000)
        assert set(policy["num_onboarded_tokens"]) == {"host", "disk"}
    assert facts["without_tiers"]["max_utilization"]["tiers"] == []
    assert list(files.glob("**/*kv_blocks*")) == []


def test_host_memory_is_taken_from_what_the_pool_is_sized_by(files: Path) -> None:
    sized = (*SIMULATE, "--memory", "0.1", "--kv-cache-free-gpu-mem-fraction", "0.5")
    without = answer(*sized)["num_blocks"]
    with_tier = answer(*sized, "--kv-cache-host-memory-bytes", str(20 * 16_384))["num_blocks"]
    assert with_tier == without - 10


@pytest.mark.parametrize("tiers", [(), TIERS])
def test_a_picture_is_drawn(files: Path, tiers: tuple[str, ...]) -> None:
    result = run(*SIMULATE, "--num-blocks", "50", "--png", "out.png", *tiers)
    assert result.exit_code == 0, result.output
    assert (files / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Exception, match=r"--png: needs matplotlib: pip install matplotlib"):
        picture.check_can_draw()
    assert "needs matplotlib" in error(*SIMULATE, "--num-blocks", "50", "--png", "out.png")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate",), "name a trace file, or ask for --example"),
        (("simulate", "trace.csv", "--example"), "name a trace file, or ask for --example"),
        (("simulate", "nowhere.csv"), "No such file"),
        (("simulate", "config.json"), "config.json, line 1: needs the columns"),
        ((*SIMULATE, "--flops", "1", "--bandwidth", "1"), "only one of them"),
        ((*SIMULATE[:4], "--flops", "1"), "--flops and --bandwidth: both are needed"),
        ((*SIMULATE[:2], "--model", "trace.csv"), "give a checkpoint folder or its config.json"),
        ((*SIMULATE, "--memory", "0.0001"), "do not hold the weights"),
        ((*SIMULATE, "--max-batch-size", "no"), "max_batch_size: 'no'"),
        ((*SIMULATE, "--kv-cache-disk-bandwidth", "0"), "--kv-cache-disk-bandwidth: 0.0 must be"),
        (
            (*SIMULATE, "--kv-cache-host-memory-bytes", "9000000", "--memory", "0.005"),
            "kv_cache_host_memory_bytes: 9000000 bytes beside the weights leave nothing",
        ),
        (
            (*SIMULATE, "--kv-cache-host-memory-bytes", "9", "--num-blocks", "9"),
            "kv_cache_host_memory_bytes: 9 holds no KV block",
        ),
        (("plan", "--input-lengths", "9", "--output-lengths", "9"), "either --rate or"),
        (
            ("plan", "--input-lengths", "9", "--output-lengths", "x", "--rate", "1"),
            "--output-lengths: 'x'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    files: Path, arguments: tuple[str, ...], said: str
) -> None:
    message = error(*arguments)
    assert said in message and "\n" not in message


PLAN = (
    "plan", "--model", "config.json", "--cost", "cost.json", "--memory", "0.05",
    "--input-lengths", "p50=60,p95=200", "--output-lengths", "40",
)  # fmt: skip


def test_a_plan_as_json_and_its_lines_are_a_configuration(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 30)
    facts = answer(*PLAN, "--rate", "1", "--shared-prefix", "32", "--groups", "2")
    assert facts["model"]["kv_bytes_per_token"] == 512
    assert len(facts["candidates"]) >= 6
    lines = "".join(f"{key}: {value}\n" for key, value in facts["configuration"].items())
    (files / "plan.yaml").write_text(lines)
    assert run("config", "--config", "plan.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("option", "value", "tried"),
    [
        ("--tokens-per-block", "16", {16}),
        ("--batch-scheduler-policy", "static_batch", {"static_batch"}),
        ("--max-tokens-in-paged-kv-cache", "4000", {125, 250, 62, 31}),
        ("--kv-cache-free-gpu-mem-fraction", "0.5", {0.5}),
    ],
)
def test_a_plan_keeps_to_what_is_configured(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: str,
    tried: set[int | float | str],
) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 80)
    facts = answer(*PLAN, "--rate", "1000", "--max-seq-len", "512", option, value)
    key = option.removeprefix("--").replace("-", "_")
    assert str(facts["configuration"][key]) == value
    seen = {
        "tokens_per_block": {each["tokens_per_block"] for each in facts["candidates"]},
        "batch_scheduler_policy": {each["policy"] for each in facts["candidates"]},
        "max_tokens_in_paged_kv_cache": {each["num_blocks"] for each in facts["candidates"]},
        "kv_cache_free_gpu_mem_fraction": {facts["configuration"][key]},
    }
    assert seen[key] == tried
    if key != "max_tokens_in_paged_kv_cache":
        assert any("as configured" in reason for reason in facts["reasons"])


def test_half_the_memory_holds_half_the_blocks(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 30)
    fraction = ("--rate", "1", "--kv-cache-free-gpu-mem-fraction")
    half, whole = (answer(*PLAN, *fraction, each)["capacity"] for each in ("0.45", "0.9"))
    assert half["num_blocks"] == whole["num_blocks"] // 2


def test_a_plan_with_tiers_says_what_came_back(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 30)
    facts = answer(*PLAN, "--rate", "1", "--shared-prefix", "32", "--groups", "20", *TIERS)
    assert all(candidate["tiers"] for candidate in facts["candidates"])
    assert any(reason.startswith("KV tiers: ") for reason in facts["reasons"])


def test_a_plan_in_words(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "NUM_REQUESTS", 30)
    result = run(*PLAN, "--concurrency", "4")
    assert result.exit_code == 0, result.output
    for part in ("fits: ", "binds first", "configuration:", "4 clients", "  tokens_per_block: "):
        assert part in result.stdout
