"""Random programs of the whole engine with host memory and a disk under its pool."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fakes.tiered_programs import Tally, TieredProgram

NUM_ACTIONS = 5


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Forwards that fail on purpose would fill it, which takes longer than the programs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_programs(first_seed: int, count: int, folder: Path) -> Tally:
    tally = Tally()
    for seed in range(first_seed, first_seed + count):
        below = folder / str(seed)
        below.mkdir()
        try:
            TieredProgram(Random(seed), tally, below).run(NUM_ACTIONS)
        except BaseException as error:
            raise AssertionError(f"program of seed {seed}") from error
        shutil.rmtree(below)
    return tally


@pytest.mark.parametrize("batch", range(4))
def test_two_thousand_programs(batch: int, tmp_path: Path) -> None:
    tally = run_programs(batch * 1000, 500, tmp_path)
    assert min(vars(tally).values()) > 5, tally


@pytest.mark.slow
def test_ten_thousand_programs(tmp_path: Path) -> None:
    tally = run_programs(1_000_000, 10_000, tmp_path)
    assert min(vars(tally).values()) > 200, tally
