"""The comparison: for each workload and repeat every system in turn, A B C A B C."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.bounds import ModelShape, least_seconds
from tests.benchmarks.compare.fleet import Fleet, Turn, WorkerError
from tests.benchmarks.compare.limits import Limits, measure_limits
from tests.benchmarks.compare.records import Figures, figures_of, make_row
from tests.benchmarks.compare.report import disturbances, print_workload
from tests.benchmarks.compare.systems import System
from tests.benchmarks.compare.workloads import Workload, make_workload

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line, resolved."""

    checkpoint: Path
    workloads: Sequence[str]
    systems: Sequence[System]
    dtype: str
    repeat: int
    budget: float
    """Seconds of one workload after which a system gets no further repeat of it."""
    threads: int
    scratch: Path
    """A folder for the logs of the workers."""


@dataclass
class Series:
    """The runs of one system of one workload."""

    runs: list[Figures] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    failed: bool = False

    @property
    def seconds(self) -> float:
        return sum(turn.run.seconds for turn in self.turns)

    @property
    def foreign_share(self) -> float:
        """CPU of other processes, in cores, over the series."""
        return sum(turn.foreign_cpu_s for turn in self.turns) / self.seconds


class Comparison:
    """``rows`` and ``least`` grow by one workload at a time, so that what is measured is kept."""

    def __init__(self, plan: Plan, fleet: Fleet, say: Say) -> None:
        self._plan, self._fleet, self._say = plan, fleet, say
        self._shape = ModelShape.of_checkpoint(plan.checkpoint, plan.dtype)
        self.rows: list[dict[str, Any]] = []
        self.least: dict[str, float] = {}
        """Seconds that each workload takes at the limits of the machine."""
        self.failures: list[str] = []

    def run_workload(self, name: str) -> None:
        """Serves it ``repeat`` times with every system and prints its table."""
        series = {system.name: Series() for system in self._plan.systems}
        measured: list[Limits] = []
        for salt in range(self._plan.repeat):
            measured.append(measure_limits(self._plan.threads, self._plan.scratch))
            for system in self._plan.systems:
                self._take_turn(system, make_workload(name, salt), salt, series[system.name])
        limits = median_limits(measured)
        workload = make_workload(name, 0)
        self.least[name] = least_seconds(workload, self._shape, self._plan.dtype, limits)
        rows = [
            self._row(system, name, series[system.name], limits)
            for system in self._plan.systems
            if series[system.name].runs
        ]
        self.rows += rows
        if rows:
            print_workload(rows, self.least[name], self._say)
        self._say(describe_limits(measured))

    def _take_turn(self, system: System, workload: Workload, salt: int, series: Series) -> None:
        if series.failed or (series.turns and series.seconds > self._plan.budget):
            return
        load = os.getloadavg()[0]
        try:
            turn = self._fleet.take_turn(system, workload, salt)
        except WorkerError as error:
            series.failed = True
            self.failures.append(f"{workload.name}: {error}")
            self._say(self.failures[-1])
            return
        series.turns.append(turn)
        series.runs.append(figures_of(workload, turn.run, load))
        seconds = turn.run.seconds
        self._say(f"{workload.name} {salt + 1}/{self._plan.repeat} {system.name}: {seconds:.2f} s")
        for line in disturbances(system.name, seconds, turn.rested_cpu_s, turn.foreign_cpu_s):
            self._say(f"  {line}")

    def _row(
        self, system: System, workload_name: str, series: Series, limits: Limits
    ) -> dict[str, Any]:
        turn = series.turns[-1]
        about = {
            "peer": system.name,
            "version": turn.version,
            "label": system.label,
            "dtype": system.weights,
            "load_s": turn.load_s,
            "settings": turn.settings
            | {
                "limits": asdict(limits) | {"least_s": self.least[workload_name]},
                "foreign_cpu_share": series.foreign_share,
            },
        }
        return make_row(about, workload_name, series.runs)


def median_limits(measured: Sequence[Limits]) -> Limits:
    return Limits(
        **{
            name: statistics.median(asdict(one)[name] for one in measured)
            for name in asdict(measured[0])
        }
    )


def describe_limits(measured: Sequence[Limits]) -> str:
    reads = [one.read_bytes / 1e9 for one in measured]
    middle = median_limits(measured)
    return (
        f"machine: reads {middle.read_bytes / 1e9:.1f} GB/s ({min(reads):.1f}-{max(reads):.1f}), "
        f"multiplies fp32 {middle.fp32_flops / 1e9:.0f}, bf16 {middle.bf16_flops / 1e9:.0f}, "
        f"int8 {middle.int8_ops / 1e9:.0f} Gop/s"
    )


def write_json(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """The rows as one list; whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    fresh.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    fresh.replace(target)
