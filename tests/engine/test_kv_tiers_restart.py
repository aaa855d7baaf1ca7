"""KV that outlives the process: through an orderly end, a kill, and a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.api import ExecutorConfig, KvCacheConfig, KvCacheRetentionConfig, KvTiersConfig
from inflight.api.kv import TokenRangeRetentionConfig
from inflight.engine.engine import Engine
from inflight.errors import ConfigError
from inflight.executor import Executor
from inflight.kv_cache.tiers.block_file import UNFINISHED_SUFFIX, BlockFiles
from inflight.kv_cache.tiers.folder import FOLDER
from inflight.kv_cache.tiers.storage import TierBlock
from tests.engine.tiered_engine import (
    MAX_TOKENS,
    NUM_BLOCKS,
    PROMPTS,
    TOKENS_PER_BLOCK,
    always_onboard,
    ask,
    engine_with,
    onboarded,
    one_round,
    settle,
    tier,
)
from tests.fakes.arithmetic_runner import ArithmeticRunner

WHOLE_BLOCKS = 6
"""Of a prompt of PROMPTS; the last is found, and not reused: one token is left to compute."""


def test_a_persisted_disk_is_used_after_a_restart_and_salts_stay_apart(tmp_path: Path) -> None:
    with engine_with(host_blocks=4, disk=tmp_path, persist=True) as engine:
        for prompt in PROMPTS:
            ask(engine, [prompt], salt="a")
            settle(engine)
    with engine_with(host_blocks=4, disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        ask(engine, [PROMPTS[0]])
        ask(engine, [PROMPTS[0]], salt="b")
        assert engine.kv.stats().reused_blocks == 0
        ask(engine, [PROMPTS[0]], salt="a")
        assert onboarded(engine, "disk") == 5
        assert engine.kv.stats().reused_blocks == 5


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path, persist=True) as engine:
        one_round(engine)
    with engine_with(disk=tmp_path, persist=True, identity="another") as engine:
        ask(engine, PROMPTS)
        assert onboarded(engine, "disk") == 0
        assert tier(engine, "disk").bad_files > 0


def test_persistence_needs_a_known_model(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="kv_cache_disk_persist"),
        engine_with(disk=tmp_path, persist=True, identity=None),
    ):
        pass


def files_in(folder: Path) -> list[Path]:
    return list((folder / FOLDER).glob("*.kvblock"))


def run_in_another_process(code: str, folder: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=environment
    )


FIRST_LIFE = """
import sys
from pathlib import Path
from tests.engine.tiered_engine import PROMPTS, ask, engine_with
with engine_with(disk=Path(sys.argv[1]), persist=True) as engine:
    ask(engine, PROMPTS[:1])
    assert engine.kv.stats().evicted_blocks == 0
"""


def test_what_the_pool_held_at_the_end_is_found_by_the_next_process(tmp_path: Path) -> None:
    with run_in_another_process(FIRST_LIFE, tmp_path) as process:
        assert process.wait(60) == 0
    assert len(files_in(tmp_path)) == WHOLE_BLOCKS
    with engine_with(disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        ask(engine, PROMPTS[:1])
        assert onboarded(engine, "disk") == engine.kv.stats().reused_blocks == WHOLE_BLOCKS - 1


KILLED_LIFE = """
import sys
import time
from pathlib import Path
from tests.engine.tiered_engine import PROMPTS, ask, engine_with
from tests.fakes.arithmetic_runner import ArithmeticRunner
class SlowToRead(ArithmeticRunner):
    def read_blocks(self, block_ids):
        time.sleep(0.05)
        return super().read_blocks(block_ids)
folder, runner = Path(sys.argv[1]), SlowToRead()
with engine_with(disk=folder, persist=True, runner=runner, num_blocks=40) as engine:
    ask(engine, PROMPTS)
    print("closing", flush=True)
"""


def test_a_kill_while_the_pool_is_written_leaves_blocks_that_are_right(tmp_path: Path) -> None:
    with run_in_another_process(KILLED_LIFE, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"closing\n"
        deadline = time.monotonic() + 20
        while len(files_in(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    assert 3 <= len(files_in(tmp_path)) < WHOLE_BLOCKS * len(PROMPTS)
    with engine_with(disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        ask(engine, PROMPTS)
        assert onboarded(engine, "disk") > 0 and tier(engine, "disk").bad_files == 0


KILLED_WHILE_SERVING = """
import os
import sys
import time
from pathlib import Path
from inflight.kv_cache.tiers import block_file
from tests.engine.tiered_engine import PROMPTS, ask, engine_with
write_all = block_file._write_all
def slowly(descriptor, part):
    time.sleep(0.01)
    write_all(descriptor, part)
block_file._write_all = slowly
with engine_with(disk=Path(sys.argv[1]), persist=True) as engine:
    print("serving", flush=True)
    while True:
        ask(engine, PROMPTS)
"""


def test_a_kill_while_evicted_blocks_are_written_leaves_blocks_that_are_right(
    tmp_path: Path,
) -> None:
    """Each file takes four writes of 10 ms, so the kill falls into one. The last blocks of a prompt
    are evicted first: there must be many before a prompt is there from its beginning."""
    most = WHOLE_BLOCKS * len(PROMPTS)
    with run_in_another_process(KILLED_WHILE_SERVING, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"serving\n"
        deadline = time.monotonic() + 20
        while len(files_in(tmp_path)) < 2 * most // 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    assert 2 * most // 3 <= len(files_in(tmp_path)) < most
    with engine_with(disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        assert list((tmp_path / FOLDER).glob(f"*{UNFINISHED_SUFFIX}")) == []
        ask(engine, PROMPTS)
        assert onboarded(engine, "disk") > 0 and tier(engine, "disk").bad_files == 0


def write_of_a_disk_for_two(folder: Path) -> Callable[[BlockFiles, Path, TierBlock], None]:
    """``BlockFiles.write`` where the disk is full as soon as it has two files."""
    whole_write = BlockFiles.write

    def write(files: BlockFiles, path: Path, block: TierBlock) -> None:
        if len(files_in(folder)) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole_write(files, path, block)

    return write


def test_a_disk_that_is_full_for_a_while_costs_blocks_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_with(disk=tmp_path) as engine:
        always_onboard(engine)
        with monkeypatch.context() as patched:
            patched.setattr(BlockFiles, "write", write_of_a_disk_for_two(tmp_path))
            one_round(engine)
            ask(engine, PROMPTS)
            settle(engine)
            assert len(files_in(tmp_path)) == 2 and tier(engine, "disk").io_errors > 0
        before = onboarded(engine, "disk")
        one_round(engine)
        one_round(engine)
        assert len(files_in(tmp_path)) > 2 and onboarded(engine, "disk") > before


def test_a_disk_that_fills_up_at_the_end_leaves_blocks_that_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(BlockFiles, "write", write_of_a_disk_for_two(tmp_path))
        with engine_with(disk=tmp_path, persist=True) as engine:
            ask(engine, PROMPTS[:1])
    assert len(files_in(tmp_path)) == 2 and "No space left" in caplog.text
    with engine_with(disk=tmp_path, persist=True) as engine:
        always_onboard(engine)
        ask(engine, PROMPTS[:1])
        assert onboarded(engine, "disk") == 2, "the first blocks of the prompt"


def test_where_the_disk_is_too_small_the_prompt_used_last_stays(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path, disk_blocks=1, persist=True) as engine:
        ask(engine, PROMPTS[:1])
        ask(engine, PROMPTS[1:2])
    num_kept = len(files_in(tmp_path))
    assert 0 < num_kept < WHOLE_BLOCKS
    with engine_with(disk=tmp_path, disk_blocks=1, persist=True) as engine:
        always_onboard(engine)
        ask(engine, PROMPTS[1:2])
        assert onboarded(engine, "disk") == num_kept


def test_a_prompt_of_high_priority_stays_before_those_used_later(tmp_path: Path) -> None:
    keep = KvCacheRetentionConfig(
        token_range_retention_configs=(TokenRangeRetentionConfig(token_start=0, priority=90),)
    )
    with engine_with(disk=tmp_path, disk_blocks=1, persist=True) as engine:
        ask(engine, PROMPTS[:1], retention=keep)
        ask(engine, PROMPTS[1:2])
    num_kept = len(files_in(tmp_path))
    with engine_with(disk=tmp_path, disk_blocks=1, persist=True) as engine:
        always_onboard(engine)
        ask(engine, PROMPTS[:1])
        assert onboarded(engine, "disk") == num_kept > 0


def test_without_persistence_nothing_of_the_pool_is_written(tmp_path: Path) -> None:
    with engine_with(disk=tmp_path) as engine:
        ask(engine, PROMPTS[:1])
    assert files_in(tmp_path) == []


def executor_with(folder: Path) -> Executor:
    tiers = KvTiersConfig(disk_bytes=1 << 20, disk_path=str(folder), disk_persist=True)
    config = ExecutorConfig(
        max_batch_size=8,
        max_num_tokens=32,
        max_seq_len=48,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK, num_blocks=NUM_BLOCKS, tiers=tiers
        ),
    )
    return Executor(ArithmeticRunner(), config, model_identity="model")


def test_the_end_of_an_executor_keeps_the_pool(tmp_path: Path) -> None:
    with executor_with(tmp_path) as executor:
        executor.generate(PROMPTS[:1], max_tokens=MAX_TOKENS)
    assert len(files_in(tmp_path)) == WHOLE_BLOCKS


def test_the_pool_of_an_engine_that_stopped_on_an_error_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_the_next_look(kv: object, goes_on: object) -> None:
        raise RuntimeError("the books do not add up")

    with executor_with(tmp_path) as executor:
        engine: Engine = executor._engine
        monkeypatch.setattr(type(engine.kv), "check_integrity", stop_at_the_next_look)
        executor.generate(PROMPTS[:1], max_tokens=MAX_TOKENS)
        executor._thread.join(10)
        assert not executor.is_healthy
    assert files_in(tmp_path) == []
