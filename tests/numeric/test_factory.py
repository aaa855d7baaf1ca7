"""Which runner and which attention serve a checkpoint, and what says no."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model import factory
from inflight.model.factory import load_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.hf_runner import HfRunner
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.numeric


def config(**values: object) -> InflightConfig:
    return InflightConfig.model_validate({"dtype": "fp32", "num_threads": 1} | values)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_auto_fuses_what_it_can(llama: Path, dtype: str) -> None:
    runner = load_runner(llama, config(dtype=dtype))
    assert isinstance(runner, FusedRunner)
    assert runner.spec.dtype == ("fp32" if dtype == "fp32" else "bf16")


def test_auto_leaves_other_architectures_to_transformers(gpt2: Path) -> None:
    runner = load_runner(gpt2, config())
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, NativeAttentionBackend)


@pytest.mark.parametrize(
    "values",
    [{"tokens_per_block": 24}, {"attention_backend": "torch"}, {"dtype": "fp16"}],
    ids=str,
)
def test_auto_falls_back_where_native_kernels_cannot(
    llama: Path, values: dict[str, object]
) -> None:
    runner = load_runner(llama, config(**values))
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, TorchAttention)


def test_without_native_kernels_torch_serves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: None)
    runner = load_runner(llama, config())
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, TorchAttention)
    assert isinstance(load_runner(llama, config(runner="fused")), FusedRunner)
    with pytest.raises(CheckpointError, match="attention_backend: cpu: there are no native"):
        load_runner(llama, config(runner="hf", attention_backend="cpu"))


def test_what_is_asked_for_by_name_is_not_replaced(gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match="runner: fused: "):
        load_runner(gpt2, config(runner="fused"))
    with pytest.raises(ConfigError, match="dtype: int8: only the fused runner"):
        load_runner(gpt2, config(dtype="int8"))
