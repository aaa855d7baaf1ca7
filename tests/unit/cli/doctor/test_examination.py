"""What the doctor says of server and engine, how it says it, and its exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.api.config import InflightConfig
from inflight.cli import main
from inflight.cli.doctor import engine, examination, server
from inflight.cli.doctor.finding import Finding, Status, guarded
from inflight.cli.errors import StartupError
from inflight.cli.ports import Endpoints
from inflight.errors import CheckpointError
from inflight.model import choice

run = CliRunner().invoke
CPU = engine.Place(has_gpu=False, has_compiler=True, has_triton=False, has_flashinfer=False)
GPU = engine.Place(has_gpu=True, has_compiler=True, has_triton=True, has_flashinfer=False)
NO_COMPILER = replace(CPU, has_compiler=False)
BARE_GPU = replace(GPU, has_triton=False)
RICH_GPU = replace(GPU, has_flashinfer=True)


def test_a_check_that_raises_is_a_bad_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise StartupError("no tritonserver", remedy="pip install it")

    monkeypatch.setattr(server, "find_installation", nothing)
    for look in (server.look_at_server, server.look_at_numpy, lambda: server.look_at_stub({})):
        found = look()
        assert (found.status, found.found) == (Status.BAD, "no tritonserver")
        assert found.remedy == "pip install it"


def test_the_server_of_this_environment() -> None:
    found = server.look_at_server()
    assert found.status is Status.GOOD and found.found.startswith("the wheel's, /")
    assert server.look_at_numpy().status is Status.GOOD


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = server.look_at_ports(Endpoints("127.0.0.1", 8000, port, 8002))
    assert found.status is Status.BAD and found.remedy == "give another --grpc-port"
    assert f"--grpc-port {port}: cannot listen" in found.found


def test_perf_analyzer_is_never_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "default_model_repository", lambda: tmp_path / "model_repository")
    assert server.look_at_perf_analyzer().status is Status.NOTE
    fetched = tmp_path / "build" / "perf_analyzer" / "perf_analyzer"
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    found = server.look_at_perf_analyzer()
    assert (found.status, found.found) == (Status.GOOD, str(fetched))


def test_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.look_at_libraries().status is Status.GOOD
    monkeypatch.setattr(engine, "installed_version", lambda name: None)
    found = engine.look_at_libraries()
    assert found.status is Status.BAD
    assert found.remedy == "pip install torch transformers tokenizers"


@pytest.mark.parametrize(
    ("keys", "place", "taken", "status"),
    [
        ({}, CPU, "takes fused on native kernels", Status.GOOD),
        ({"dtype": "fp16"}, CPU, "takes hf on torch attention", Status.NOTE),
        ({"attention_backend": "torch"}, CPU, "takes hf on torch attention", Status.NOTE),
        ({"kv_cache_dtype": "fp16"}, CPU, "takes hf on torch attention", Status.NOTE),
        ({"runner": "hf"}, CPU, "runner hf takes hf", Status.GOOD),
        ({}, GPU, "here: fused on Triton-language kernels, hf on torch", Status.GOOD),
        ({"dtype": "fp16"}, GPU, "takes fused on Triton-language kernels", Status.GOOD),
        ({"attention_backend": "torch"}, GPU, "takes fused on torch", Status.NOTE),
        ({}, BARE_GPU, "takes hf on torch attention", Status.NOTE),
        ({}, RICH_GPU, "Triton-language kernels, with FlashInfer's attention", Status.GOOD),
        ({"attention_backend": "flashinfer"}, RICH_GPU, "takes fused on", Status.GOOD),
        ({"attention_backend": "flashinfer"}, GPU, "here: fused on Triton", Status.BAD),
        ({"attention_backend": "flashinfer"}, CPU, "here: fused on native", Status.BAD),
        ({"dtype": "fp8"}, CPU, "here: fused on native kernels", Status.BAD),
        ({"dtype": "int4"}, GPU, "here: fused on Triton-language", Status.BAD),
        ({"dtype": "int4"}, CPU, "takes fused on native kernels", Status.GOOD),
        ({"dtype": "int4", "runner": "hf"}, CPU, "here: fused on native", Status.BAD),
        ({"dtype": "int8", "attention_backend": "torch"}, CPU, "here: fused on", Status.BAD),
        ({"dtype": "int4"}, NO_COMPILER, "takes fused on torch", Status.NOTE),
        ({"runner": "fused", "attention_backend": "torch"}, CPU, "here: fused on", Status.BAD),
        ({"runner": "fused", "attention_backend": "torch"}, NO_COMPILER, "fused on", Status.NOTE),
        ({"runner": "fused", "attention_backend": "cpu"}, NO_COMPILER, "here: hf", Status.BAD),
        ({"dtype": "int4", "runner": "fused"}, NO_COMPILER, "takes fused on torch", Status.NOTE),
        ({"dtype": "fp8"}, BARE_GPU, "here: hf on torch attention", Status.BAD),
        ({"runner": "fused"}, BARE_GPU, "here: hf on torch attention", Status.BAD),
        (
            {"runner": "fused", "attention_backend": "torch"},
            BARE_GPU,
            "takes fused on torch",
            Status.NOTE,
        ),
        ({"attention_backend": "triton"}, CPU, "here: fused on native", Status.BAD),
        ({"attention_backend": "cpu"}, CPU, "takes fused on native kernels", Status.GOOD),
        ({"attention_backend": "cpu"}, NO_COMPILER, "here: hf on torch", Status.BAD),
        ({"attention_backend": "cpu"}, GPU, "here: fused on Triton-language", Status.BAD),
        (
            {},
            replace(NO_COMPILER, has_triton=True),
            "here: hf on torch attention; runner auto takes hf on torch attention",
            Status.NOTE,
        ),
    ],
)
def test_the_runner_that_is_taken(
    keys: dict[str, str], place: engine.Place, taken: str, status: Status
) -> None:
    found = engine.look_at_runner(InflightConfig.model_validate(keys), place)
    assert taken in found.found and found.status is status


@pytest.mark.parametrize(
    ("keys", "place", "dtype"),
    [
        ({}, CPU, "bf16"),
        ({"runner": "hf"}, CPU, "fp32"),
        ({"attention_backend": "torch"}, CPU, "fp32"),
        ({}, NO_COMPILER, "fp32"),
        ({"runner": "fused"}, NO_COMPILER, "fp32"),
        ({"dtype": "int8"}, CPU, None),
        ({}, GPU, None),
    ],
)
def test_what_dtype_auto_is_without_products_of_bf16(
    keys: dict[str, str], place: engine.Place, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "computes_bf16", lambda: False)
    means = engine.look_at_runner(InflightConfig.model_validate(keys), place).means
    assert means.endswith(f"; dtype auto is {dtype}") if dtype else "dtype auto" not in means


def test_the_requests_that_fit() -> None:
    config = InflightConfig(dtype="bf16", kv_cache_free_gpu_mem_fraction=0.5)
    weights = 2 * 134_515_008  # SmolLM2-135M, counted to the percent by its sizes
    found = engine.look_at_memory(config, weights + (1 << 30))
    blocks = (1 << 29) // (2 * 30 * 3 * 64 * 2 * 32)  # K, V; layers, heads, head_dim, bytes, tokens
    assert found.means.startswith(f"{blocks * 32:,} tokens of KV cache")
    assert found.means.endswith(f"{blocks * 32 // 1024} requests of 1024 tokens at once")
    default = engine.look_at_memory(InflightConfig(dtype="bf16"), weights + (1 << 30))
    assert default.means.startswith(f"{int(0.9 * (1 << 30)) // (2 * 30 * 3 * 64 * 2 * 32) * 32:,} ")
    small = engine.look_at_memory(config, weights // 2)
    assert small.status is Status.BAD and "do not fit" in small.means


def test_what_a_first_start_writes() -> None:
    written = engine.first_start_bytes(InflightConfig(dtype="bf16"))
    assert written == pytest.approx(6 * 134.5e6, rel=0.01)


def test_a_checkpoint_that_cannot_be_sized_yet(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    config = InflightConfig(model_dir=str(file))
    assert engine.first_start_bytes(config) is None
    found = engine.look_at_memory(config, 3 << 30)
    assert found.status is Status.NOTE and found.found.startswith("3.0 GiB of memory of the card")


def test_a_look_that_fails_is_a_finding() -> None:
    def refused() -> Finding:
        raise CheckpointError("model_dir: /nowhere does not exist")

    def broken() -> Finding:
        raise PermissionError(13, "Permission denied")

    bad = guarded("checkpoint", refused)
    assert (bad.status, bad.found) == (Status.BAD, "model_dir: /nowhere does not exist")
    unknown = guarded("cache", broken)
    assert unknown.status is Status.NOTE and unknown.found.startswith("PermissionError: ")


def findings(*statuses: Status) -> list[Finding]:
    return [
        Finding(what=f"thing {n}", found="a", means="b", status=status, remedy="fix it")
        for n, status in enumerate(statuses)
    ]


def test_the_verdict_names_what_is_missing() -> None:
    text = examination.as_text(findings(Status.GOOD, Status.BAD, Status.NOTE))
    lines = text.splitlines()
    assert lines[0].startswith("good  thing 0  a") and lines[2].startswith("BAD   thing 1  a")
    assert [line.strip() for line in lines].count("do: fix it") == 2  # not of what is good
    assert lines[-1] == "this machine does not serve: thing 1"
    assert examination.as_text(findings(Status.NOTE)).endswith(
        "this machine serves: inflight serve"
    )


def test_json_says_the_same() -> None:
    value = json.loads(examination.as_json(findings(Status.GOOD, Status.BAD)))
    assert value["serves"] is False
    assert [each["status"] for each in value["findings"]] == ["good", "bad"]
    assert set(value["findings"][0]) == {"what", "found", "means", "status", "remedy"}


def test_the_command_and_its_exit_code(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    result = run(main.app, ["doctor", "--json", "--model", nowhere, "--cache-dir", str(tmp_path)])
    by_name = {each["what"]: each for each in json.loads(result.output)["findings"]}
    assert result.exit_code == 1
    assert by_name["checkpoint"]["status"] == "bad"
    assert all(by_name[name]["status"] != "bad" for name in ("memory", "disk", "runner"))
    assert nowhere in by_name["checkpoint"]["found"]
    assert by_name["cache"]["status"] == "good"
    assert len(by_name) == 21


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from inflight.cli.main import app; sys.argv = ['inflight', 'doctor'];\n"
        "try: app()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_of_a_start_points_at_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["inflight", "serve", "--model-repository", str(tmp_path / "x")]
    )
    with pytest.raises(SystemExit) as exited:
        main.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert exited.value.code == 1 and line.endswith("(inflight doctor looks at everything)")
