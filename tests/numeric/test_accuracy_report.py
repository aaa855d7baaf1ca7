"""``inflight build --report`` on a tiny quantized model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from inflight.api.config import InflightConfig
from inflight.cli import report as report_module
from inflight.cli.build import build
from inflight.cli.report import report
from inflight.model import factory
from tests.fakes.tiny_gguf import tiny_llama, write_gguf
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric


def test_one_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = native_library()
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: library)
    monkeypatch.setattr(report_module, "WINDOW", 32)
    stored = GGMLQuantizationType.Q4_1
    write_gguf(
        tmp_path / "tiny.gguf",
        tiny_llama(),
        kind_of=lambda name: None if "norm" in name else stored,
    )
    said: list[str] = []
    config = InflightConfig(
        model_dir=str(tmp_path / "tiny.gguf"), cache_dir=str(tmp_path / "cache"), num_threads=1
    )
    built = build(config, said.append)
    assert built.config.max_seq_len == 256
    assert any("the engine of tiny (" in line for line in said)

    capsys.readouterr()
    report(built, said.append, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["num_tokens"] == 96 and "pydoc" in result["text"]
    rows: dict[tuple[str, ...], dict[str, Any]] = {
        (row["computed_by"], row["dtype"], row["kv_cache_dtype"]): row for row in result["rows"]
    }
    ours = [("fp32", "auto"), ("bf16", "auto"), ("int8", "auto"), ("int4", "auto")]
    assert list(rows) == [
        ("transformers", "fp32", "-"),
        ("transformers", "bf16", "-"),
        *(("inflight", *way) for way in [*ours, ("bf16", "int8")]),
    ]
    assert rows["inflight", "fp32", "auto"]["error"] < 1e-4
    assert rows["inflight", "bf16", "auto"]["same_as_bf16"] == 1
    assert rows["inflight", "int8", "auto"]["error"] > rows["inflight", "fp32", "auto"]["error"]
    assert all(row["perplexity"] > 1 for row in rows.values())

    report(built, said.append, as_json=False)
    table = capsys.readouterr().out
    assert "perplexity" in table and table.count("inflight") == 5
