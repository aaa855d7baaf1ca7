"""The comparison's drivers that run in this environment, on a tiny checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.benchmarks.compare.driver import MAX_SEQ_LEN, LoadOptions, make_driver
from tests.benchmarks.compare.records import figures_of
from tests.benchmarks.compare.systems import DRIVERS
from tests.benchmarks.compare.workloads import Job, Workload
from tests.fakes.tiny_models import VOCAB_SIZE, save_tiny_checkpoint, tiny_config

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("llama", max_position_embeddings=MAX_SEQ_LEN)
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-llama"), config)


def workload() -> Workload:
    """More requests than may be in flight; with a random model an end id would come up."""
    draw = random.Random(0)
    jobs = []
    for place in range(12):
        prompt = tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(4, 60)))
        jobs.append(Job(place, prompt, draw.randint(1, 40)))
    return Workload("W3", tuple(jobs), concurrency=4)


@pytest.mark.parametrize("driver", ["inflight_engine", "transformers_cb"])
def test_every_request_emits_what_was_asked(driver: str, checkpoint: Path) -> None:
    options = LoadOptions(
        checkpoint=str(checkpoint), weights="fp32", slots=4, slot_tokens=0, reuse=False, threads=1
    )
    system = make_driver(DRIVERS + driver, options)
    try:
        asked = workload()
        for _ in range(2):
            run = system.serve(asked, "")
            assert figures_of(asked, run, 0.0)["exact_lengths"]
            assert all(r.token_times == sorted(r.token_times) for r in run.records)
            assert all(r.token_times[-1] <= run.seconds for r in run.records)
    finally:
        system.close()
