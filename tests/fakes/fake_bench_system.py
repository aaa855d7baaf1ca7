"""A driver for the comparison that computes nothing; ``weights`` says how it behaves."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Workload


class System:
    """``ok``; ``no-load``: cannot be loaded; ``no-serve``: fails when it serves; ``dies``: its
    process ends without a word; ``silent``: never answers."""

    version = "fake 1"

    def __init__(self, options: LoadOptions) -> None:
        if options.weights == "no-load":
            raise RuntimeError("no such weights\nand a second line")
        print("a library that prints to standard output")
        self._behaviour = options.weights
        self._num_served = 0
        self.settings: dict[str, Any] = {"pid": os.getpid(), "slots": options.slots}

    def serve(self, workload: Workload, door: str) -> Run:
        """Records tell the order of the calls: tokens come at second 1 of the first, 2 of the
        second call."""
        if self._behaviour == "no-serve":
            raise ValueError("cannot serve")
        if self._behaviour == "dies":
            os._exit(3)
        if self._behaviour == "silent":
            time.sleep(60)
        self._num_served += 1
        times = {job.job_id: [float(self._num_served)] * job.max_tokens for job in workload.jobs}
        records = [Record(job_id, 0.0, came) for job_id, came in times.items()]
        return Run(float(self._num_served), records)

    def close(self) -> None:
        """Nothing was opened."""
