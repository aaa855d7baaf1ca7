"""What only a GPU is asked for, asked without one: tensors that say they are on a card and have no
numbers, and a torch.cuda that answers what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inflight.api.config import InflightConfig
from inflight.errors import ConfigError
from inflight.kernels.launch import multiprocessors
from inflight.model import factory
from inflight.model.attention import KvLayer
from inflight.model.device import load
from inflight.model.device.cuda_runtime import CudaRuntime
from inflight.model.device.linears import (
    FP8_DTYPE,
    DenseLinear,
    Fp8Linear,
    reference_scaled_product,
    scaled_product,
)
from inflight.model.device.plain_runtime import PlainRuntime
from inflight.model.dtypes import choose_device, choose_dtype
from inflight.model.native_attention import unsupported_layers
from inflight.native.kv_storage import read_blocks, write_blocks

pytestmark = pytest.mark.numeric

CARD = torch.device("cuda", 0)


@pytest.fixture
def on_card() -> Iterator[FakeTensorMode]:
    """Inside of it tensors of CUDA have shapes, strides and dtypes, as torch checks and infers
    them there."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def on(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CARD)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_a_card_are_sums_in_fp32(
    on_card: FakeTensorMode, dtype: torch.dtype, has_bias: bool
) -> None:
    """Of half precision through a product that only CUDA has."""
    linear = DenseLinear(on(48, 32, dtype=dtype), on(48, dtype=dtype) if has_bias else None)
    x = on(3, 32, dtype=dtype)
    assert x.device.type == "cuda"
    logits = linear.in_fp32(x)
    assert logits.shape == (3, 48) and logits.dtype is torch.float32
    assert linear(x).dtype is dtype


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_fp8_products_are_asked_for_as_cuda_takes_them(
    on_card: FakeTensorMode, num_rows: int
) -> None:
    """torch checks layouts, scales by row and multiples of 16 before any kernel runs."""
    linear = Fp8Linear(on(48, 32), on(48), scaled_product)
    assert linear.weight.dtype is FP8_DTYPE and linear.weight.device.type == "cuda"
    y = linear(on(num_rows, 32))
    assert y.shape == (num_rows, 48) and y.dtype is torch.bfloat16
    wrong = Fp8Linear(on(48, 40), None, scaled_product)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        wrong(on(num_rows, 40))


def test_a_card_computes_bf16_where_its_hardware_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def answer(**options: Any) -> bool:
        asked.append(options)
        return len(asked) == 1

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
    assert choose_dtype("auto", CARD) is torch.bfloat16
    assert choose_dtype("auto", CARD) is torch.float32
    assert asked == [{"including_emulation": False}] * 2, "emulated it would be slow"
    assert choose_dtype("fp16", CARD) is torch.float16


def test_a_card_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == CARD
    assert choose_device("cpu") == torch.device("cpu")


def test_programs_are_counted_by_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert multiprocessors(CARD) == 132 and multiprocessors(torch.device("cpu")) == 1


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 6), False), ((8, 9), True)])
def test_fp8_needs_a_card_that_has_it(
    capability: tuple[int, int], has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    runtime, config = load.make_runtime(CARD), InflightConfig(dtype="fp8")
    assert isinstance(runtime, CudaRuntime) and runtime.has_fp8 is has_fp8
    if has_fp8:
        assert load._scaled_product(config, runtime) is scaled_product
    else:
        with pytest.raises(ConfigError, match="fp8: needs a GPU of compute capability 8.9"):
            load._scaled_product(config, runtime)
    assert load._scaled_product(InflightConfig(), runtime) is None
    stand_in = load.make_runtime(torch.device("cpu"))
    assert isinstance(stand_in, PlainRuntime)
    assert load._scaled_product(config, stand_in) is reference_scaled_product


def test_transformers_on_a_card_compile_no_kernels_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    monkeypatch.setattr(factory, "choose_device", lambda name: CARD)
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: pytest.fail("it was compiled"))
    monkeypatch.setattr(factory, "load_hf_runner", lambda *arguments: loads.append(arguments[2]))
    factory.load_runner(tmp_path, InflightConfig(runner="hf"))
    assert loads == [None]


def test_native_attention_leaves_a_card_alone() -> None:
    layer = KvLayer(num_kv_heads=2, key_dim=64, value_dim=64)
    reason = unsupported_layers((layer,), torch.float32, CARD)
    assert reason == "native attention runs on the CPU, not on cuda"
    assert unsupported_layers((layer,), torch.float32, torch.device("cpu")) is None


class Elsewhere(torch.Tensor):
    """Says that it is not on the CPU, and cannot be had as numpy's."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("it is on a card")


def test_blocks_are_written_where_numpy_does_not_reach() -> None:
    """From memory that may only be read."""
    storage = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3)
    contents = read_blocks([storage], np.array([3, 1], dtype=np.int32))
    for content in contents:
        content.flags.writeable = False
    target = torch.zeros(2, 4, 3).as_subclass(Elsewhere)
    write_blocks([target], np.array([0, 2], dtype=np.int32), contents)
    found = target.as_subclass(torch.Tensor)
    assert torch.equal(found[:, [0, 2]], storage[:, [3, 1]]) and not found[:, [1, 3]].any()
