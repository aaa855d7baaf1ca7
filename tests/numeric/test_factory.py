"""Which runner and which attention serve a checkpoint, and what says no."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model import choice, factory
from inflight.model.factory import load_runner
from inflight.model.fused import build
from inflight.model.fused.runner import FusedRunner
from inflight.model.fused.spec import DecoderSpec
from inflight.model.hf_runner import HfRunner
from inflight.model.native_attention import NativeAttentionBackend
from inflight.model.torch_attention import TorchAttention
from inflight.native import library
from inflight.native.build import NativeUnavailableError
from tests.fakes.tiny_models import tiny_checkpoint
from tests.numeric.native_library import native_library

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


@pytest.mark.parametrize("computes", [True, False])
def test_dtype_auto_is_that_of_who_computes(
    llama: Path, gpt2: Path, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "computes_bf16", lambda: computes)
    in_torch = "bf16" if computes else "fp32"
    native_library()
    assert load_runner(llama, config(dtype="auto")).spec.dtype == "bf16"
    assert load_runner(gpt2, config(dtype="auto")).spec.dtype == in_torch
    assert load_runner(llama, config(dtype="auto", runner="hf")).spec.dtype == in_torch
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: None)
    assert load_runner(llama, config(dtype="auto")).spec.dtype == in_torch
    fused = load_runner(llama, config(dtype="auto", runner="fused"))
    assert isinstance(fused, FusedRunner) and fused.spec.dtype == in_torch


def test_auto_leaves_other_architectures_to_transformers(
    gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = load_runner(gpt2, config())
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, NativeAttentionBackend)
    assert "served by transformers' classes" in caplog.text and "gpt2" in caplog.text
    assert "torch attends" not in caplog.text


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"tokens_per_block": 24}, "native kernels do not take tokens_per_block 24"),
        ({"attention_backend": "torch"}, "attention_backend is torch"),
        ({"dtype": "fp16"}, "native kernels do not compute in fp16"),
        ({"kv_cache_dtype": "fp16"}, "native kernels do not store fp16"),
    ],
    ids=str,
)
def test_auto_falls_back_where_native_kernels_cannot_and_says_why(
    llama: Path, values: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = load_runner(llama, config(**values))
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, TorchAttention)
    assert f"served by transformers' classes, slower than the fused: {why}" in caplog.text
    is_asked_for = "attention_backend" in values
    assert ("torch attends, slower than kernels would: " in caplog.text) is not is_asked_for


def test_without_native_kernels_torch_serves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: None)
    runner = load_runner(llama, config())
    assert isinstance(runner, HfRunner)
    assert isinstance(runner.backend, TorchAttention)
    runner = load_runner(llama, config(runner="fused", attention_backend="torch"))
    assert isinstance(runner, FusedRunner)
    for name in ("fused", "hf"):
        with pytest.raises(CheckpointError, match="attention_backend: cpu: there are no native"):
            load_runner(llama, config(runner=name, attention_backend="cpu"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_without_native_kernels_torch_computes_what_only_the_fused_runner_has(
    llama: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(cache_dir: str, *, every_isa: bool) -> Path:
        raise NativeUnavailableError("no compiler")

    monkeypatch.setattr(library, "build_native", no_compiler)
    runner = load_runner(llama, config(dtype=dtype))
    assert isinstance(runner, FusedRunner) and runner.spec.dtype == "bf16"
    assert not runner.spec.supported_tokens_per_block, "any: these are torch's operations"
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["native kernels are off, torch computes instead (slower): no compiler"]


def test_torch_operations_are_proved_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_read = build.read_spec

    def another(directory: Path) -> DecoderSpec:
        spec = really_read(directory)
        return replace(spec, attention_scale=4 * spec.attention_scale)

    monkeypatch.setattr(factory, "load_native", lambda cache_dir: None)
    monkeypatch.setattr(build, "read_spec", another)
    for values in ({"runner": "fused"}, {"dtype": "int8"}):
        with pytest.raises(CheckpointError, match="llama is not served: packed and plain logits"):
            load_runner(llama, config(**values))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"attention_backend": "torch"}, "attention_backend: torch: runner fused attends with its"),
        ({"tokens_per_block": 24}, "tokens_per_block: 24 must be one of 16, 32, 64, 128 for the"),
    ],
    ids=str,
)
def test_keys_that_the_fused_runner_has_not(
    llama: Path, values: dict[str, object], why: str
) -> None:
    native_library()
    with pytest.raises(ConfigError, match=why):
        load_runner(llama, config(runner="fused", **values))


def test_what_is_asked_for_by_name_is_not_replaced(gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match="runner: fused: "):
        load_runner(gpt2, config(runner="fused"))
    with pytest.raises(ConfigError, match="dtype: int8: only the fused runner computes in it$"):
        load_runner(gpt2, config(dtype="int8", runner="hf"))


def test_a_dtype_that_only_the_first_choice_has_is_refused_with_its_reason(
    llama: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(directory: Path, dtype: str) -> str:
        with pytest.raises(ConfigError) as refused:
            load_runner(directory, config(dtype=dtype))
        return str(refused.value)

    common = "only the fused runner computes in it, which cannot serve this here: "
    assert refusal(llama, "fp8") == f"dtype: fp8: {common}fp8 is computed on a GPU only"
    assert refusal(gpt2, "int8") == f"dtype: int8: {common}the fused runner does not know gpt2"
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: None)
    assert refusal(gpt2, "int4") == f"dtype: int4: {common}the fused runner does not know gpt2"
