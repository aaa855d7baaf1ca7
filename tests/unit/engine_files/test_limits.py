"""The record of what an engine was built for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inflight.engine_files.limits import LIMITS_FILE, BuiltLimits, read_limits, write_limits

LIMITS = BuiltLimits(
    max_batch_size=64,
    max_num_tokens=512,
    max_seq_len=8192,
    max_beam_width=1,
    dtype="bf16",
    kv_cache_dtype="auto",
)


def test_it_comes_back(tmp_path: Path) -> None:
    assert read_limits(tmp_path) is None
    write_limits(tmp_path, LIMITS)
    assert read_limits(tmp_path) == LIMITS
    wider = replace(LIMITS, max_num_tokens=1024)
    write_limits(tmp_path, wider)
    assert read_limits(tmp_path) == wider
    assert [path.name for path in tmp_path.iterdir()] == [LIMITS_FILE]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"max_batch_size": 1}'])
def test_a_record_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / LIMITS_FILE).write_text(text)
    assert read_limits(tmp_path) is None


def test_a_record_with_values_of_other_types_is_none(tmp_path: Path) -> None:
    write_limits(tmp_path, LIMITS)
    path = tmp_path / LIMITS_FILE
    path.write_text(path.read_text().replace("512", '"512"'))
    assert read_limits(tmp_path) is None


def test_what_goes_beyond_is_named() -> None:
    wanted = replace(LIMITS, max_num_tokens=1024, max_seq_len=10, kv_cache_dtype="int8")
    assert list(wanted.beyond(LIMITS)) == [
        "max_num_tokens 1024 is more than the 512 it was built for",
        "kv_cache_dtype int8 is not the auto it was built for",
    ]
    assert list(LIMITS.beyond(LIMITS)) == []


def test_a_wider_record_keeps_what_was_wider() -> None:
    wanted = replace(LIMITS, max_num_tokens=1024, max_batch_size=8, kv_cache_dtype="int8")
    wider = LIMITS.widened_to(wanted)
    assert wider == replace(LIMITS, max_num_tokens=1024, kv_cache_dtype="int8")
    assert list(wanted.beyond(wider)) == list(replace(LIMITS, kv_cache_dtype="int8").beyond(wider))
    assert list(wanted.beyond(wider)) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_limits(tmp_path / "nothing", LIMITS)
    assert read_limits(tmp_path / "nothing") is None
