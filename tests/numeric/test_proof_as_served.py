"""An engine is proved as it serves: by recorded calls, with K and V stored as configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError
from inflight.model import factory
from inflight.model.fused.built import BuiltDecoder, course_logits, prove, prove_kv_storage
from inflight.model.probe import TOLERANCE
from inflight.native.attention import NativeAttention
from inflight.native.library import NativeLibrary
from inflight.native.recorded_calls import CallRecorder, RecordedCalls
from tests.fakes.tiny_models import tiny_checkpoint
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric

DTYPES = ("fp32", "bf16", "int8", "int4")
NORM, LINEAR, ATTEND = 0, 3, 4
"""Numbers of src/recorded.cpp."""


Calls = list[Any]
"""(what it is, its arguments) of each, as CallRecorder keeps them."""


def of(calls: Calls, number: int) -> list[Any]:
    return [call for call in calls if call[0].number == number]


def another_epsilon(calls: Calls) -> None:
    _, arguments = of(calls, NORM)[-1]
    epsilon = np.array([arguments[6]]).view(np.float32)[:1] * np.float32(4096)
    arguments[6] = int(np.append(epsilon, np.float32(0)).view(np.int64)[0])


def another_layers_cache(calls: Calls) -> None:
    first, second = of(calls, ATTEND)[:2]
    second[1][4] = first[1][4]


def stores_what_it_should_add(calls: Calls) -> None:
    adding = next(arguments for _, arguments in of(calls, LINEAR) if arguments[4] & 4)
    adding[4] &= ~4


def a_call_less(calls: Calls) -> None:
    calls.remove(of(calls, NORM)[1])


def rows_of_the_first_iteration(calls: Calls) -> None:
    place = next(i for i, call in enumerate(calls) if call[0].number == LINEAR)
    recordable, arguments = calls[place]
    calls[place] = (recordable._replace(place_of_rows=None), arguments)


FAULTS = (
    another_epsilon, another_layers_cache, stores_what_it_should_add, a_call_less,
    rows_of_the_first_iteration,
)  # fmt: skip


def spoil(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Calls], None]) -> None:
    really_make = RecordedCalls.__init__

    def make(recorded: RecordedCalls, library: NativeLibrary, recorder: CallRecorder) -> None:
        fault(recorder.calls)
        really_make(recorded, library, recorder)

    monkeypatch.setattr(RecordedCalls, "__init__", make)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_recorded_call_is_refused(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: Callable[[Calls], None]
) -> None:
    engine = engine_of(dtype)
    assert prove(engine, dtype, native_library(), 32) <= TOLERANCE[dtype]
    spoil(monkeypatch, fault)
    with pytest.raises(CheckpointError, match="llama is not served: "):
        prove(engine, dtype, native_library(), 32)


def test_what_rounding_would_hide_is_found(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, another_epsilon)
    with pytest.raises(CheckpointError, match="recorded calls compute something else"):
        prove(engine_of("int4"), "int4", native_library(), 32)


def test_experts_are_proved_as_they_serve(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their calls are not recorded."""
    spoil(monkeypatch, a_call_less)
    assert prove(engine_of("bf16", "mixtral"), "bf16", native_library(), 32) <= TOLERANCE["bf16"]


def configured(kv_cache_dtype: str) -> InflightConfig:
    values = {"kv_cache_dtype": kv_cache_dtype, "tokens_per_block": 32}
    return InflightConfig.model_validate(values)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_kv_storage_passes_its_proof(engine_of: Any, model_type: str, dtype: str, kv: str) -> None:
    engine = engine_of(dtype, model_type)
    prove_kv_storage(engine, dtype, native_library(), configured(kv))
    if kv != "int8":
        return
    exact = course_logits(engine, native_library(), 32)
    assert not torch.equal(course_logits(engine, native_library(), 32, kv), exact)


def test_int8_storage_that_goes_wrong_is_refused(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("bf16")
    really_plan = NativeAttention.plan

    def plan(attention: NativeAttention, rows: Any) -> None:
        if attention.storage.dtype is torch.int8:
            rows = replace(rows, slot_mapping=rows.slot_mapping[::-1].copy())
        really_plan(attention, rows)

    monkeypatch.setattr(NativeAttention, "plan", plan)
    assert prove(engine, "bf16", native_library(), 32) <= TOLERANCE["bf16"]
    prove_kv_storage(engine, "bf16", native_library(), configured("auto"))
    with pytest.raises(CheckpointError, match="llama is not served: .*logits"):
        prove_kv_storage(engine, "bf16", native_library(), configured("int8"))


def test_every_load_proves_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []
    really_prove = factory.prove_kv_storage

    def note(engine: BuiltDecoder, dtype: str, library: Any, config: InflightConfig) -> None:
        proved.append(config.kv_cache_dtype)
        really_prove(engine, dtype, library, config)

    monkeypatch.setattr(factory, "prove_kv_storage", note)
    directory = tiny_checkpoint(tmp_path / "model")
    library: NativeLibrary | None = native_library()
    for native in (library, library, None):
        monkeypatch.setattr(factory, "load_native", lambda cache_dir, native=native: native)
        config = InflightConfig(
            runner="fused", dtype="fp32", kv_cache_dtype="int8", cache_dir=str(tmp_path / "cache")
        )
        factory.load_runner(directory, config)
    assert proved == ["int8"] * 3
