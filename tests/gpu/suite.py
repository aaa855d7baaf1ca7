"""The suite: every stage within its limit and all of them within one budget, then the table.

    bash tests/gpu/run.sh [--cpu] [--seconds N] [--only NAME ...] [--out FOLDER]

Exit status: 0 when every row is ok, low or skipped; 1 when one failed. The table comes in any case,
also after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from tests.gpu.budget import END_VARIABLE
from tests.gpu.environment import CARD
from tests.gpu.rows import Outcome, Row
from tests.gpu.stage_process import run_stage
from tests.gpu.stages import (
    CPU_SUITE_SECONDS,
    STAGES,
    SUITE_SECONDS,
    Stage,
)
from tests.gpu.table import Report, as_json, as_markdown, as_text

LEAST_STAGE_SECONDS = 5.0
"""With less than this left a stage is not begun."""

RunStage = Callable[[Sequence[str], Mapping[str, str], float, Callable[[str], None]], list[Row]]


class Suite:
    """Runs stages one after the other; ``results`` has what is there at any moment."""

    def __init__(
        self,
        *,
        on_cpu: bool,
        seconds: float,
        environment: Mapping[str, str],
        run: RunStage = run_stage,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = print,
    ) -> None:
        self.results: dict[str, list[Row]] = {}
        self._on_cpu = on_cpu
        self._environment = dict(environment)
        if on_cpu:
            self._environment["TRITON_INTERPRET"] = "1"
        self._run_stage, self._clock, self._say = run, clock, say
        self._began = clock()
        self._end = self._began + seconds

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._began

    def run(self, stages: Sequence[Stage]) -> None:
        """A stage may use what those before it left over of their time."""
        for number, stage in enumerate(stages, 1):
            left = self._end - self._clock()
            kept = sum(later.limit(on_cpu=self._on_cpu) for later in stages[number:])
            head = f"[{self.seconds:3.0f} s] {number}/{len(stages)} {stage.title}"
            if left < LEAST_STAGE_SECONDS:
                self._say(f"{head}: skipped, the time is used up")
                note = "the suite's time was used up"
                self.results[stage.title] = [
                    Row(what=stage.name, outcome=Outcome.SKIPPED, note=note)
                ]
                continue
            limit = min(left, max(stage.limit(on_cpu=self._on_cpu), left - kept))
            self._say(f"{head}: at most {limit:.0f} s")
            self.results[stage.title] = self._result(stage, limit)

    def _result(self, stage: Stage, limit: float) -> list[Row]:
        command = (sys.executable, "-u", *stage.command(on_cpu=self._on_cpu))
        environment = self._environment | {END_VARIABLE: str(self._clock() + limit)}
        try:
            rows = self._run_stage(command, environment, limit, self._show)
        except OSError as error:
            rows = [Row(what="the stage itself", outcome=Outcome.FAILED, note=str(error))]
        for row in rows:
            if row.judged is not Outcome.OK:
                self._say(f"    {row.judged.value}: {row.what}: {row.note}")
        return rows

    def _show(self, line: str) -> None:
        self._say(f"    {self.seconds:3.0f} s | {line[:140]}")

    def report(self, date: str) -> Report:
        machine = self.results.get(STAGES[0].title, [])
        card = next((row.note for row in machine if row.what == CARD), "an unknown card")
        return Report(date=date, card=card, seconds=self.seconds, stages=dict(self.results))


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    suite = Suite(
        on_cpu=options.cpu,
        seconds=options.seconds or (CPU_SUITE_SECONDS if options.cpu else SUITE_SECONDS),
        environment=os.environ,
        say=lambda line: print(line, flush=True),
    )
    wanted = wanted_stages(options.only)
    try:
        suite.run(wanted)
    except KeyboardInterrupt:
        print("stopped; what there is so far:", flush=True)
    now = datetime.now(timezone.utc)
    report = suite.report(f"{now:%Y-%m-%d}")
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("json", as_json(report)), ("md", as_markdown(report))):
        (options.out / f"suite.{suffix}").write_text(text, encoding="utf-8")
    print(f"\n{as_text(report)}\n\nalso in {options.out}/suite.json and suite.md", flush=True)
    sys.exit(1 if report.count(Outcome.FAILED) or len(suite.results) < len(wanted) else 0)


def wanted_stages(names: Sequence[str] | None) -> list[Stage]:
    """Those of ``names``, in their order; None: all."""
    return [stage for stage in STAGES if names is None or stage.name in names]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a CPU stand-in, in small")
    parser.add_argument("--seconds", type=float, help="the budget of all stages together")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these stages")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="for JSON, Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
