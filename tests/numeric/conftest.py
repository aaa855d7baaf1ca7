"""For tests that ask for them: native linears (``ops``), on each instruction set with ``isa``, and
engines of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from inflight.api.config import InflightConfig
from inflight.model.fused.build import build_engine
from inflight.model.fused.built import BuiltDecoder
from inflight.native.library import Isa, NativeLibrary
from inflight.native.linear import NativeLinear
from tests.fakes.tiny_models import tiny_checkpoint
from tests.numeric.native_library import library_limited_to, native_library


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with library_limited_to(request.param).limited_to(request.param):
        yield request.param


@pytest.fixture
def library() -> NativeLibrary:
    return native_library()


@pytest.fixture
def ops(library: NativeLibrary) -> NativeLinear:
    return NativeLinear(library)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BuiltDecoder]:
    """The engine of a tiny model, built once for each dtype."""
    cache_dir = tmp_path_factory.mktemp("cache")

    @cache
    def make(dtype: str, model_type: str = "llama") -> BuiltDecoder:
        directory = tiny_checkpoint(tmp_path_factory.mktemp("model"), model_type)
        config = InflightConfig(dtype=dtype, cache_dir=str(cache_dir), max_seq_len=64)
        return build_engine(directory, config, native_library(), lambda *_: None)

    return make
