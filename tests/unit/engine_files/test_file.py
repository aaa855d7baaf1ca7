"""An engine's files give back the same bits, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine_files import file, header, memory
from inflight.engine_files.file import read_engine, write_engine
from inflight.engine_files.header import DATA_FILE, HEADER_FILE, DamagedEngineError, read_key
from inflight.errors import ConfigError
from tests.unit.engine_files.contents import Dense, Model, assert_same, make_key, make_model


def write(folder: Path) -> Model:
    model = make_model()
    write_engine(folder, make_key(), model, looked_up=[model.table])
    return model


@pytest.mark.parametrize("gives", [True, False])
def test_the_same_bits_in_huge_pages_or_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    monkeypatch.setattr(file, "gives_huge_pages", lambda: gives)
    model = write(tmp_path)
    found = read_engine(tmp_path, Model)
    assert_same(found, model)
    assert read_key(tmp_path) == make_key()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if str(tmp_path) in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]

    def is_mapped(tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in spans)

    assert is_mapped(found.table), "what is looked up is never copied"
    assert isinstance(found.layers[0], Dense)
    assert is_mapped(found.layers[0].weight) is not gives


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    write(tmp_path)
    entries = json.loads((tmp_path / HEADER_FILE).read_text())["engine"]["tensors"]
    assert len(entries) > 5 and all(entry["offset"] % 64 == 0 for entry in entries)


def test_tensors_of_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", 4096)
    big = Dense(weight=torch.arange(10_000), bias=torch.arange(5_000))
    write_engine(tmp_path, make_key(), big, looked_up=[big.bias] if big.bias is not None else [])
    found = read_engine(tmp_path, Dense)
    assert torch.equal(found.weight, big.weight)
    assert found.bias is not None and big.bias is not None and torch.equal(found.bias, big.bias)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0, 100, -1, -64])
def test_one_wrong_bit_in_the_data(tmp_path: Path, place: int) -> None:
    write(tmp_path)
    flip(tmp_path / DATA_FILE, place)
    with pytest.raises(DamagedEngineError, match="a checksum is wrong"):
        read_engine(tmp_path, Model)


@pytest.mark.parametrize("keep", [0, 1, 5000])
def test_data_that_are_cut_short(tmp_path: Path, keep: int) -> None:
    write(tmp_path)
    path = tmp_path / DATA_FILE
    path.write_bytes(path.read_bytes()[:-1] if keep == 5000 else path.read_bytes()[:keep])
    with pytest.raises(DamagedEngineError, match="bytes instead of"):
        read_key(tmp_path)
    with pytest.raises(DamagedEngineError, match="bytes instead of"):
        read_engine(tmp_path, Model)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"engine": {}}', '{"checksum": "x"}'])
def test_a_header_that_is_not_whole(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / HEADER_FILE).write_text(text)
    with pytest.raises(DamagedEngineError, match="is not whole"):
        read_engine(tmp_path, Model)


def test_a_header_that_was_edited(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / HEADER_FILE
    path.write_text(path.read_text().replace('"bf16"', '"fp32"', 1))
    with pytest.raises(DamagedEngineError, match="its checksum is wrong"):
        read_key(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"content": {}},
        {"checksums": [[]]},
        {"streamed_bytes": "many"},
        {"tensors": [{"dtype": "load", "shape": [1], "offset": 0}]},
        {"tensors": [{"dtype": "float32", "shape": [1 << 40], "offset": 0}]},
        {"key": {}},
    ],
    ids=str,
)
def test_a_whole_header_of_another_form(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path)
    header.write_header(tmp_path, header.read_header(tmp_path) | change)
    with pytest.raises(DamagedEngineError):
        read_key(tmp_path)
        read_engine(tmp_path, Model)


@pytest.mark.parametrize("name", [HEADER_FILE, DATA_FILE])
def test_a_file_that_is_gone(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DamagedEngineError, match=name):
        read_engine(tmp_path, Model)


def test_an_engine_of_other_classes(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DamagedEngineError, match="another form"):
        read_engine(tmp_path, Dense)


def failing(number: int) -> Callable[..., Any]:
    """A call that the system answers with this error."""

    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOMEM])
@pytest.mark.parametrize("where", ["open", "read_text", "stat"])
def test_what_the_system_refuses_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    write(tmp_path)
    monkeypatch.setattr(file, "gives_huge_pages", lambda: False)
    monkeypatch.setattr(Path, where, failing(number))
    with pytest.raises(ConfigError) as refused:
        read_engine(tmp_path, Model)
    text = str(refused.value)
    assert text.startswith(f"cache_dir: the built engine cannot be read: {tmp_path}")
    assert text.endswith(os.strerror(number)) and "\n" not in text


def test_no_thread_to_check_with_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)

    def no_thread(workers: int) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(memory, "ThreadPoolExecutor", no_thread)
    with pytest.raises(ConfigError, match="cannot be read: can't start new thread"):
        read_engine(tmp_path, Model)


class _Memory(mmap.mmap):
    """Memory of a kernel that knows no huge pages."""

    def madvise(self, *_: Any) -> None:
        failing(errno.EINVAL)()


class _TooLittleMemory(mmap.mmap):
    """A system that maps files and has nothing to give for a copy."""

    def __new__(cls, descriptor: int, *arguments: Any, **options: Any) -> Any:
        if descriptor == -1:
            failing(errno.ENOMEM)()
        return super().__new__(cls, descriptor, *arguments, **options)


@pytest.mark.parametrize("kind", [_Memory, _TooLittleMemory])
def test_without_huge_pages_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[mmap.mmap]
) -> None:
    monkeypatch.setattr(file, "gives_huge_pages", lambda: True)
    model = write(tmp_path)
    monkeypatch.setattr(memory.mmap, "mmap", kind)
    assert_same(read_engine(tmp_path, Model), model)
