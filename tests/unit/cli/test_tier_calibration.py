"""How fast KV moves into the tiers: what is moved, what it comes to, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from inflight.api import ExecutorConfig, KvCacheConfig, KvTiersConfig
from inflight.cli.calibration import measure
from inflight.cli.option_groups import MemoryOptions
from inflight.cli.sizing import tier_speeds
from inflight.cli.tier_calibration import measure_disk_tier, measure_host_tier
from inflight.errors import ConfigError
from inflight.simulator.calibration_file import Calibration
from inflight.simulator.example import EXAMPLE_COST
from inflight.simulator.model_shape import EMBEDDED_MODEL, ModelShape
from inflight.simulator.tiers import Bandwidth
from tests.fakes.arithmetic_runner import ArithmeticRunner
from tests.fakes.checked_kv_store import CheckedKvStore

NUM_BLOCKS, SIZE = 12, 4
BLOCK_BYTES = 8 * SIZE


class TimedStore(CheckedKvStore):
    """A block read takes a second, a block written two, and nothing else takes any time."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, SIZE)
        self.now = 0.0
        table = np.arange(NUM_BLOCKS, dtype=np.int32)
        self.write(table, list(range(NUM_BLOCKS * SIZE)), 0, None)

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        self.now += 1.0 * len(block_ids)
        return super().read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self.now += 2.0 * len(block_ids)
        super().write_blocks(block_ids, contents)

    def is_whole(self) -> bool:
        table = np.arange(NUM_BLOCKS, dtype=np.int32)
        return self.holds(table, list(range(NUM_BLOCKS * SIZE)), None)


def test_each_way_of_host_memory_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimedStore()
    monkeypatch.setattr(time, "perf_counter", lambda: store.now)
    assert measure_host_tier(store, NUM_BLOCKS) == Bandwidth(BLOCK_BYTES / 1.0, BLOCK_BYTES / 2.0)
    assert store.is_whole()


def test_the_disk_is_measured_in_its_folder_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    assert measure_disk_tier(TimedStore(), NUM_BLOCKS, folder).is_possible
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_cache_disk_path"):
        measure_disk_tier(TimedStore(), NUM_BLOCKS, tmp_path / "file")


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_calibration_measures_the_tiers_that_are_configured(
    tmp_path: Path, with_disk: bool
) -> None:
    tiers = KvTiersConfig(
        host_memory_bytes=0 if with_disk else 1 << 20,
        disk_bytes=1 << 20 if with_disk else 0,
        disk_path=str(tmp_path),
    )
    limits = ExecutorConfig(
        max_batch_size=2,
        max_num_tokens=64,
        max_seq_len=64,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, tiers=tiers),
    )
    runner = ArithmeticRunner(windows=(None, 8))
    measured = measure(runner, limits)
    assert len(runner.num_blocks) == 1, "with tiers all layers share a pool"
    assert (measured.host is None, measured.disk is None) == (with_disk, not with_disk)
    assert list(tmp_path.iterdir()) == []


def test_an_option_overrides_what_was_measured() -> None:
    model = ModelShape.of(EMBEDDED_MODEL, dtype="bf16", kv_cache_dtype="auto")
    measured = Calibration(EXAMPLE_COST, host=Bandwidth(3e9, 2e9))
    speeds = tier_speeds(MemoryOptions(), model, measured)
    assert (speeds.host, speeds.disk) == (Bandwidth(3e9, 2e9), Bandwidth.both(0.5e9))
    speeds = tier_speeds(MemoryOptions(host_bandwidth=7.0), model, measured)
    assert speeds.host == Bandwidth.both(7e9)
