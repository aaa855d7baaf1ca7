"""Who serves a checkpoint where there is a GPU; a CPU stands in for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model import factory
from inflight.model.device import load
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.device.runner import DeviceRunner
from inflight.model.dtypes import choose_device
from tests.fakes.tiny_models import save_tiny_checkpoint, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.numeric

SMALL = {"dtype": "fp32", "max_num_tokens": 64, "max_batch_size": 2, "attention_backend": "torch"}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> torch.device:
        return torch.device("cpu" if name == "cpu" else "cuda")

    monkeypatch.setattr(factory, "choose_device", found)
    monkeypatch.setattr(load, "make_runtime", lambda device: PlainRuntime(torch.device("cpu")))


@pytest.fixture
def hf_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of transformers' classes."""
    loads: list[str] = []

    def load(directory: Path, *rest: Any, why_not_fused: str | None = None) -> None:
        loads.append(directory.name)

    monkeypatch.setattr(factory, "load_hf_runner", load)
    return loads


def load_runner(directory: Path, **keys: Any) -> Any:
    return factory.load_runner(directory, InflightConfig.model_validate(SMALL | keys))


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_gpu_takes_the_device_runner(
    model_type: str, tmp_path: Path, hf_loads: list[str]
) -> None:
    said: list[tuple[str, float]] = []
    runner = factory.load_runner(
        tiny_checkpoint(tmp_path, model_type),
        InflightConfig.model_validate(SMALL),
        progress=lambda what, share: said.append((what, share)),
    )
    assert isinstance(runner, DeviceRunner) and not hf_loads
    assert said == [("loading weights to cpu", (layer + 1) / 3) for layer in range(3)]


def test_a_load_is_logged_by_tenths(
    tmp_path: Path, hf_loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", factory.__name__)
    config = tiny_config("llama", num_hidden_layers=40)
    factory.load_runner(
        save_tiny_checkpoint(tmp_path, config), InflightConfig.model_validate(SMALL)
    )
    line = "loading the model: loading weights to cpu"
    lines = [message for message in caplog.messages if message.startswith(line)]
    assert lines == [f"{line} ({tenth * 10}%)" for tenth in range(11)]


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [("gpt2", {}), ("llama", {"kv_cache_dtype": "int8"})],
)
def test_what_it_cannot_serve_goes_to_transformers(
    model_type: str, keys: dict[str, Any], tmp_path: Path, hf_loads: list[str]
) -> None:
    directory = tiny_checkpoint(tmp_path / model_type, model_type)
    load_runner(directory, **keys)
    assert hf_loads == [model_type]


def test_without_kernels_transformers_serve(
    tmp_path: Path, hf_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_checkpoint(tmp_path / "llama")
    monkeypatch.setattr(load, "why_no_kernels", lambda config: "there is no Triton")
    load_runner(directory, attention_backend="auto")
    assert hf_loads == ["llama"]


def test_kernels_that_cannot_be_compiled_are_said_in_words(
    tmp_path: Path, hf_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    directory = tiny_checkpoint(tmp_path / "llama")
    monkeypatch.setenv("CC", "a-compiler-that-is-nowhere")
    load_runner(directory, attention_backend="auto")
    assert hf_loads == ["llama"]
    with pytest.raises(ConfigError, match="attention_backend: triton: Triton compiles with C comp"):
        load_runner(directory, attention_backend="triton")
    monkeypatch.setattr(PlainRuntime, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(PlainRuntime, "__init__", lambda runtime, device: None)
    with pytest.raises(ConfigError, match="runner: fused: Triton compiles with C compiler"):
        load_runner(directory, attention_backend="auto", runner="fused")


@pytest.mark.parametrize(
    ("model_type", "dtype", "why"),
    [
        ("llama", "int8", "dtype int8 is computed on a CPU only"),
        ("gpt2", "fp8", "the fused runner does not know gpt2"),
    ],
)
def test_what_neither_can_serve_is_refused_with_the_reason(
    model_type: str, dtype: str, why: str, tmp_path: Path
) -> None:
    directory = tiny_checkpoint(tmp_path, model_type)
    with pytest.raises(ConfigError, match=f"dtype: {dtype}: only the fused runner .* here: {why}"):
        load_runner(directory, dtype=dtype)


@pytest.mark.parametrize("runner", ["auto", "hf", "fused"])
def test_native_attention_is_not_had_on_a_gpu(runner: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend: cpu: a GPU computes here"):
        load_runner(tiny_checkpoint(tmp_path), attention_backend="cpu", runner=runner)


def test_runner_fused_is_no_wish_but_an_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runner: fused: kv_cache_dtype int8 is stored on a CPU"):
        load_runner(tiny_checkpoint(tmp_path), runner="fused", kv_cache_dtype="int8")


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_kernels_of_a_gpu_are_nobody_elses(backend: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    for keys in ({"runner": "hf"}, {"device": "cpu"}):
        with pytest.raises(ConfigError, match=f"attention_backend: {backend}: only the fused"):
            load_runner(directory, attention_backend=backend, **keys)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_kernels_of_a_gpu_are_no_wish_but_an_order(
    backend: str, tmp_path: Path, hf_loads: list[str]
) -> None:
    keys = {"attention_backend": backend, "kv_cache_dtype": "int8"}
    with pytest.raises(ConfigError, match=f"attention_backend: {backend}: kv_cache_dtype int8 is"):
        load_runner(tiny_checkpoint(tmp_path), **keys)
    assert not hf_loads


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu") == choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: cuda: torch finds no CUDA device"):
        choose_device("cuda")


def test_who_runs_without_graphs_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    runtime = PlainRuntime(torch.device("cuda"))
    keys = {"attention_backend": "torch", "max_batch_size": 4}
    config = InflightConfig.model_validate(keys)
    assert load._graph_sizes(config, runtime) == ()
    assert load._graph_sizes(config, PlainRuntime(torch.device("cpu"))) == (1, 2, 4)
    without = InflightConfig.model_validate(keys | {"cuda_graph_mode": False})
    assert load._graph_sizes(without, runtime) == ()

    def stop(*_: object, **__: object) -> None:
        raise CheckpointError("enough")

    monkeypatch.setattr("inflight.model.loading.load_model", stop)
    for each in (config, without):
        with pytest.raises(CheckpointError, match="enough"):
            factory.load_hf_runner(Path(), each, None)
    assert caplog.messages == [
        "cuda_graph_mode: torch's attention runs without CUDA graphs",
        "cuda_graph_mode: transformers' classes run without CUDA graphs",
    ]
