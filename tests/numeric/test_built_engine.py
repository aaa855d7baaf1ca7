"""A loaded engine is the freshly packed model, bit for bit, and is proved at every load."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.api.config import InflightConfig
from inflight.engine_files.header import DATA_FILE
from inflight.engine_files.key import engine_key
from inflight.engine_files.limits import read_limits
from inflight.engine_files.store import EngineStore
from inflight.errors import CheckpointError
from inflight.model import factory
from inflight.model.factory import load_runner
from inflight.model.fused import build, built
from inflight.model.fused.built import BuiltDecoder, find_engine, prove
from inflight.model.fused.load import build_fused_runner
from inflight.model.fused.runner import FusedRunner
from inflight.model.hf_runner import HfRunner
from tests.fakes.tiny_models import tiny_checkpoint
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric


def config(cache: Path, **values: object) -> InflightConfig:
    given = {"dtype": "fp32", "num_threads": 1, "cache_dir": str(cache), "max_seq_len": 64}
    return InflightConfig.model_validate(given | values)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the user's own cache: they are slow to compile."""
    library = native_library()
    monkeypatch.setattr(factory, "load_native", lambda cache_dir: library)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


def load(directory: Path, config: InflightConfig) -> FusedRunner:
    runner = load_runner(directory, config)
    assert isinstance(runner, FusedRunner)
    return runner


def leaves(value: Any) -> Iterator[Any]:
    """Every tensor and plain value of a dataclass, in the order of its fields."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def assert_same_bits(found: Any, wanted: Any) -> None:
    compared = 0
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
            compared += 1
        else:
            assert one == other
    assert compared > 10


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *(("llama", dtype) for dtype in ("fp32", "bf16", "int8", "int4")),
        ("gemma2", "fp32"),
        ("qwen2", "int8"),
        ("qwen3_moe", "bf16"),
    ],
)
def test_the_same_bits_as_packed_afresh(
    cache: Path, tmp_path: Path, model_type: str, dtype: str
) -> None:
    directory = tiny_checkpoint(tmp_path / "model", model_type)
    wanted = build_fused_runner(directory, config(cache, dtype=dtype), native_library())
    first = load(directory, config(cache, dtype=dtype))
    again = load(directory, config(cache, dtype=dtype))
    for runner in (first, again):
        assert runner.decoder.spec == wanted.decoder.spec
        assert_same_bits(runner.decoder.weights, wanted.decoder.weights)


LOAD = """
import sys
from pathlib import Path
from inflight.api.config import InflightConfig
from inflight.model.factory import find_engine, make_runner
config = InflightConfig(dtype="fp32", num_threads=1, cache_dir=sys.argv[2], max_seq_len=64)
engine = find_engine(Path(sys.argv[1]), config)
make_runner(engine.spec, engine.weights, None, config)
sys.exit("transformers" in sys.modules)
"""


def test_a_built_engine_is_loaded_without_transformers(cache: Path, llama: Path) -> None:
    load(llama, config(cache))
    command = [sys.executable, "-c", LOAD, str(llama), str(cache)]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0


def test_dtype_auto_takes_the_engine_of_what_it_stands_for(llama: Path, tmp_path: Path) -> None:
    store = EngineStore(str(tmp_path))
    keys = {dtype: engine_key(llama, dtype, str(tmp_path)) for dtype in ("fp32", "bf16")}
    load(llama, config(tmp_path, dtype="fp32"))
    assert store.has(keys["fp32"]) and not store.has(keys["bf16"])
    assert load(llama, config(tmp_path, dtype="auto")).spec.dtype == "bf16"
    assert store.has(keys["bf16"])
    limits = read_limits(store.folder(keys["bf16"]))
    assert limits is not None and limits.dtype == "bf16"


def test_a_damaged_engine_is_built_again(
    cache: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = load(llama, config(cache))
    key = engine_key(llama, "fp32", str(cache))
    path = EngineStore(str(cache)).folder(key) / DATA_FILE
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = load(llama, config(cache))
    assert "is damaged, building it again" in caplog.text
    assert_same_bits(again.decoder.weights, wanted.decoder.weights)


def engine_of(llama: Path, cache: Path) -> BuiltDecoder:
    load(llama, config(cache))
    engine = find_engine(llama, config(cache))
    assert engine is not None
    return engine


def test_the_proof_fails_where_the_model_is_another(cache: Path, llama: Path) -> None:
    engine = engine_of(llama, cache)
    assert prove(engine, "fp32", native_library(), 32) < 1e-4
    scaled = replace(engine.spec, attention_scale=2 * engine.spec.attention_scale)
    with pytest.raises(CheckpointError, match="llama is not served: .*logits"):
        prove(replace(engine, spec=scaled), "fp32", native_library(), 32)


def test_the_proof_counts_the_layers(
    cache: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama, cache)
    really_load = build.load_model

    def with_one_layer_more(*arguments: Any, **options: Any) -> Any:
        model = really_load(*arguments, **options)
        model.config.num_hidden_layers += 1
        return model

    monkeypatch.setattr(build, "load_model", with_one_layer_more)
    with pytest.raises(CheckpointError, match="3 layers are described, and the model has 4"):
        load(llama, config(cache, dtype="bf16", cache_dir=str(cache / "other")))
    assert len(engine.spec.layers) == 3


def test_a_model_that_fails_its_proof_is_not_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_read = build.read_spec

    def another(directory: Path) -> Any:
        spec = really_read(directory)
        return replace(spec, attention_scale=2 * spec.attention_scale)

    monkeypatch.setattr(build, "read_spec", another)
    with pytest.raises(CheckpointError, match="differ by"):
        load(llama, config(tmp_path))
    engines = tmp_path / "engines"
    assert [path.suffix for path in engines.iterdir()] == [".lock"]


def test_every_load_is_proved_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load that builds, one that finds the engine, and one that waited for another builder."""
    proofs: list[BuiltDecoder] = []
    really_compute = built.course_logits

    def note(engine: BuiltDecoder, *arguments: Any) -> Tensor:
        proofs.append(engine)
        return really_compute(engine, *arguments)

    monkeypatch.setattr(built, "course_logits", note)
    first = load(llama, config(tmp_path))
    assert len(proofs) == 1 and proofs[0].weights is first.decoder.weights
    load(llama, config(tmp_path))
    assert len(proofs) == 2
    monkeypatch.setattr(factory, "find_engine", lambda *_: None)
    load(llama, config(tmp_path))
    assert len(proofs) == 3


def test_limits_are_recorded_and_widened(
    cache: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = engine_key(llama, "fp32", str(cache))
    folder = EngineStore(str(cache)).folder(key)
    load(llama, config(cache))
    limits = read_limits(folder)
    assert limits is not None
    assert (limits.max_num_tokens, limits.max_seq_len, limits.dtype) == (512, 64, "fp32")
    written = (folder / DATA_FILE).stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        load(llama, config(cache, max_num_tokens=1024, max_batch_size=8))
    assert "max_num_tokens 1024 is more than the 512" in caplog.text
    assert "max_batch_size" not in caplog.text
    limits = read_limits(folder)
    assert limits is not None
    assert (limits.max_num_tokens, limits.max_batch_size) == (1024, 64)
    assert (folder / DATA_FILE).stat().st_mtime_ns == written


def test_a_cache_that_cannot_be_written_serves_from_memory(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engines").write_text("a file, not a folder")
    with caplog.at_level(logging.WARNING):
        runner = load(llama, config(tmp_path))
    assert "the engine is not kept" in caplog.text
    wanted = build_fused_runner(llama, config(tmp_path), native_library())
    assert_same_bits(runner.decoder.weights, wanted.decoder.weights)


def test_what_cannot_be_fused_is_remembered(cache: Path, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "deepseek_v3")
    assert isinstance(load_runner(directory, config(cache)), HfRunner)
    key = engine_key(directory, "fp32", str(cache))
    reason = EngineStore(str(cache)).reason_against(key)
    assert reason == "the fused runner does not know deepseek_v3"
