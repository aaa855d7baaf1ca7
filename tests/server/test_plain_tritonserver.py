"""The repository is plain: `tritonserver --model-repository` takes it as it lies."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.cli.installation import find_installation
from inflight.cli.launch import server_environment
from tests.server.harness import MODELS, REPOSITORY, Client, free_ports
from tests.server.tiny_checkpoint import make_tiny_checkpoint


@contextmanager
def plain_tritonserver(
    folder: Path, config: dict[str, object], *options: str
) -> Iterator[tuple[Client, Path]]:
    """NVIDIA's binary with nothing of ours around it; its log beside."""
    installation = find_installation()
    http_port, grpc_port, metrics_port = free_ports(3)
    log = folder / "tritonserver.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                str(installation.server),
                f"--model-repository={REPOSITORY}",
                f"--backend-directory={installation.backend_directory(folder)}",
                *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
                f"--http-port={http_port}",
                f"--grpc-port={grpc_port}",
                f"--metrics-port={metrics_port}",
                "--exit-timeout-secs=5",
                f"--backend-config=python,shm-region-prefix-name=plain_{http_port}",
                *options,
            ],
            env=server_environment(config, None),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Client(http_port, grpc_port, metrics_port), log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(client: Client, path: str, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if client.call(path, timeout=5)[0] == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.2)


def test_configured_by_the_environment(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny")
    with plain_tritonserver(tmp_path, {"model_dir": checkpoint}) as (client, log):
        for model in MODELS:
            wait_for(client, f"/v2/models/{model}/ready", log)
        for model in ("inflight_llm", "ensemble"):
            body = client.generate(model, text_input="hello", max_tokens=5, end_id=-1)
            assert body["finish_reason"] == "length"


def test_configured_by_a_load_time_override(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny")
    with plain_tritonserver(tmp_path, {}, "--model-control-mode=explicit") as (client, log):
        wait_for(client, "/v2/health/live", log)
        own = {"model_dir": str(checkpoint), "max_seq_len": "100", "dtype": "fp32"}
        status, answer = load(client, own)
        assert status == 200, (answer, log.read_text(errors="replace")[-3000:])
        body = client.generate("inflight_llm", text_input="hello", max_tokens=5, end_id=-1)
        assert body["finish_reason"] == "length"
        assert "max_seq_len is 100" in client.refuse(
            "inflight_llm", text_input="x" * 100, max_tokens=1
        )
        status, _ = client.call("/v2/repository/models/inflight_llm/unload", {})
        assert status == 200
        status, answer = load(client, own | {"max_batch_sise": "4"})
        assert status != 200
        assert "max_batch_sise" in log.read_text(errors="replace")


def load(client: Client, parameters: dict[str, str]) -> tuple[int, object]:
    """Loads inflight_llm with these parameters on top of its own config."""
    text = (REPOSITORY / "inflight_llm" / "config.pbtxt").read_text()
    config = parse_pbtxt(text)
    config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    body = {"parameters": {"config": json.dumps(config)}}
    return client.call("/v2/repository/models/inflight_llm/load", body)


def parse_pbtxt(text: str) -> dict[str, object]:
    """The model configuration as the JSON that the load API takes."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    parsed = json_format.MessageToDict(
        text_format.Parse(text, ModelConfig()), preserving_proto_field_name=True
    )
    assert isinstance(parsed, dict)
    return parsed
