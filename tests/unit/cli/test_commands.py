"""The commands as a user types them, in this process."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from inflight.api import executor_config
from inflight.api.config import InflightConfig
from inflight.cli import config_table, main, serve
from inflight.cli.config_keys import config_keys
from inflight.cli.ports import Endpoints
from inflight.errors import ConfigError

ROOT = Path(__file__).parents[3]
run = CliRunner().invoke


def options_of(command: str) -> set[str]:
    (info,) = [
        i for i in main.app.registered_commands if (i.name or i.callback.__name__) == command
    ]
    return set(inspect.signature(info.callback).parameters)


@pytest.mark.parametrize("command", ["serve", "doctor", "prepare", "config"])
def test_there_is_an_option_for_each_key_and_no_other_of_its_kind(command: str) -> None:
    others = {
        "host", "http_port", "grpc_port", "metrics_port", "model_repository", "config_file",
        "log_file", "restart", "ready_timeout", "as_json",
    }  # fmt: skip
    assert options_of(command) - others == set(InflightConfig.model_fields)


def test_help_lists_the_options_of_serve() -> None:
    text = run(main.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for key in config_keys():
        assert key.option in text
    assert "--no-restart" in text


def test_every_source_is_heard_and_the_option_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("max_batch_size: 4\nmax_queue_size: 5\ndtype: fp32\n")
    monkeypatch.setenv("INFLIGHT_MAX_QUEUE_SIZE", "6")
    monkeypatch.setenv("INFLIGHT_DTYPE", "bf16")
    result = run(
        main.app,
        ["config", "--config", str(file), "--dtype", "fp16", "--enable-kv-cache-reuse", "false"],
    )
    printed = yaml.safe_load(result.output)
    assert result.exit_code == 0
    assert (printed["max_batch_size"], printed["max_queue_size"]) == (4, 6)
    assert printed["dtype"] == "fp16"
    assert printed["enable_kv_cache_reuse"] is False


def test_what_config_prints_is_a_config_file(tmp_path: Path) -> None:
    printed = run(main.app, ["config", "--model", "/models/mine"]).output
    (tmp_path / "again.yaml").write_text(printed)
    loaded = InflightConfig.load(environment={}, file=tmp_path / "again.yaml")
    assert loaded == InflightConfig(model_dir="/models/mine")


def test_a_wrong_value_names_the_key() -> None:
    result = run(main.app, ["config", "--max-batch-size", "many"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("max_batch_size: 'many'")


def test_our_errors_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["inflight", "config", "--dtype", "int7"])
    with pytest.raises(SystemExit) as exited:
        main.main()
    assert exited.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("inflight: dtype: 'int7'")


def test_a_port_out_of_range_is_refused() -> None:
    result = run(main.app, ["serve", "--http-port", "70000"])
    assert result.exit_code == 2
    assert "--http-port" in result.output


def test_version_names_what_matters() -> None:
    lines = run(main.app, ["version"]).output.splitlines()
    assert [line.split()[0] for line in lines] == [
        "inflight", "python", "nvidia-pytriton", "torch", "transformers", "tokenizers", "numpy",
    ]  # fmt: skip


def test_the_ready_text_holds_a_command_to_paste() -> None:
    text = serve.ready_text(Endpoints("0.0.0.0", 18000, 18001, 18002), 12.34)
    assert text.startswith("ready after 12.3 s: HTTP 127.0.0.1:18000, gRPC 127.0.0.1:18001")
    assert "  curl -N http://127.0.0.1:18000/v2/models/inflight_llm/generate_stream -d '{" in text


def test_the_page_of_keys_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_table.render(), (
        "run: python -m inflight.cli.config_table docs/configuration.md"
    )


def test_the_page_names_keys_and_fields_that_exist() -> None:
    keys = set(InflightConfig.model_fields)
    assert set(config_table.EXECUTOR_FIELDS) <= keys
    assert keys >= config_table.SHARED_WITH_TENSORRT_LLM
    for field in config_table.EXECUTOR_FIELDS.values():
        owner, _, name = field.partition(".")
        assert name in getattr(executor_config, owner).__dataclass_fields__
