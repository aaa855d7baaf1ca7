"""The frame of the GPU suite: its budget, rows and table. No stage computes anything here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.gpu.budget import END_VARIABLE, seconds_left
from tests.gpu.rows import Outcome, Row, read_row
from tests.gpu.stages import (
    CPU_SUITE_SECONDS,
    STAGES,
    SUITE_SECONDS,
    Stage,
)
from tests.gpu.suite import LEAST_STAGE_SECONDS, Suite, wanted_stages
from tests.gpu.table import Report, as_json, as_markdown, as_text

NINE_MINUTES = 540.0


def stage(name: str, seconds: float) -> Stage:
    return Stage(name=name, title=name.title(), seconds=seconds, cpu_seconds=seconds / 2)


class Recorder:
    """In place of processes: each stage takes as long as it is told to, up to its limit."""

    def __init__(self, *taken: float) -> None:
        self.now = 100.0
        self.limits: list[float] = []
        self.environments: list[Mapping[str, str]] = []
        self._taken = iter(taken)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        limit: float,
        show: Callable[[str], None],
    ) -> list[Row]:
        self.limits.append(limit)
        self.environments.append(environment)
        show("working")
        self.now += min(limit, next(self._taken))
        return [Row(what=command[-1])]

    def suite(self, seconds: float, *, on_cpu: bool = False) -> tuple[Suite, list[str]]:
        said: list[str] = []
        suite = Suite(
            on_cpu=on_cpu,
            seconds=seconds,
            environment={"PATH": "/bin"},
            run=self.run,
            clock=lambda: self.now,
            say=said.append,
        )
        return suite, said


def test_a_stage_gets_its_limit_or_what_is_left() -> None:
    recorder = Recorder(30, 50)
    suite, said = recorder.suite(100)
    suite.run([stage("one", 40), stage("two", 90)])
    assert recorder.limits == [40, 70]  # the second wants more than there is
    assert said[0] == "[  0 s] 1/2 One: at most 40 s"
    assert "      0 s | working" in said


def test_what_a_stage_leaves_over_goes_to_the_next() -> None:
    recorder = Recorder(5, 60, 10)
    suite, _ = recorder.suite(100)
    suite.run([stage("one", 40), stage("two", 40), stage("three", 20)])
    assert recorder.limits == [40, 75, 35]


def test_no_stage_begins_when_the_time_is_used_up() -> None:
    recorder = Recorder(60, 60, 60)
    suite, said = recorder.suite(100 + LEAST_STAGE_SECONDS / 2)
    suite.run([stage("one", 60), stage("two", 40), stage("three", 10)])
    assert recorder.limits == [60, 40]
    (row,) = suite.results["Three"]
    assert row.outcome is Outcome.SKIPPED and "used up" in row.note
    assert said[-1].endswith("skipped, the time is used up")


def test_the_cpu_stand_in_is_told_so() -> None:
    recorder = Recorder(1)
    suite, _ = recorder.suite(100, on_cpu=True)
    suite.run([stage("one", 40)])
    assert recorder.limits == [100]
    assert recorder.environments[0].items() >= {"PATH": "/bin", "TRITON_INTERPRET": "1"}.items()
    assert suite.results["One"] == [Row(what="--cpu")]


def test_a_stage_that_cannot_be_started_is_a_row() -> None:
    def no_process(*_: object) -> list[Row]:
        raise FileNotFoundError(2, "No such file")

    recorder = Recorder()
    suite, _ = recorder.suite(100)
    suite._run_stage = no_process
    suite.run([stage("one", 40)])
    assert suite.results["One"][0].outcome is Outcome.FAILED


def test_what_is_judged_is_tuned() -> None:
    tuned = [each.name for each in STAGES if "--tune" in each.command(on_cpu=False)]
    assert tuned == ["kernel_speed", "engine_speed"]


def test_the_whole_stays_below_nine_minutes() -> None:
    assert SUITE_SECONDS <= NINE_MINUTES - 30  # unpacking, the table, the end of the last stage
    assert sum(each.seconds for each in STAGES) <= SUITE_SECONDS
    assert CPU_SUITE_SECONDS <= NINE_MINUTES


def test_stages_that_are_asked_for_run_in_their_order() -> None:
    assert wanted_stages(None) == list(STAGES)
    asked = wanted_stages([STAGES[-1].name, STAGES[0].name])
    assert asked == [STAGES[0], STAGES[-1]]


def test_the_last_stage_gets_what_is_left_over() -> None:
    recorder = Recorder(10, 20)
    suite, _ = recorder.suite(100)
    suite.run([stage("one", 100), stage("two", 0)])
    assert recorder.limits == [100, 90]


def test_a_stage_knows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(10, 20)
    suite, _ = recorder.suite(100)
    suite.run([stage("one", 40), stage("two", 50)])
    ends = [environment[END_VARIABLE] for environment in recorder.environments]
    assert ends == ["150.0", "200.0"]
    monkeypatch.setenv(END_VARIABLE, str(time.monotonic() + 100))
    assert 99 < seconds_left() <= 100
    monkeypatch.delenv(END_VARIABLE)
    assert seconds_left() == math.inf


def test_a_stage_of_leftovers_ends_itself_with_a_row() -> None:
    script = "from tests.gpu.budget import *; skip_rest_in_time('x'); time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=dict(os.environ) | {END_VARIABLE: str(time.monotonic() + 1)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    row = read_row(done.stdout)
    assert row is not None and (row.what, row.outcome) == ("x", Outcome.SKIPPED)


@pytest.mark.parametrize(
    ("row", "share", "judged"),
    [
        (Row(what="a", value=3.0, ceiling=4.0, target=0.8), 0.75, Outcome.LOW),
        (Row(what="a", value=3.2, ceiling=4.0, target=0.8), 0.8, Outcome.OK),
        (Row(what="a", value=2.0, target=3.0), None, Outcome.LOW),
        (Row(what="a", value=3.0, target=3.0), None, Outcome.OK),
        (Row(what="a", value=1.0, ceiling=4.0), 0.25, Outcome.OK),
        (Row(what="a", value=1.0, ceiling=0.0, target=0.5), None, Outcome.OK),
        (
            Row(what="a", value=1.0, ceiling=4.0, target=0.5, outcome=Outcome.FAILED),
            0.25,
            Outcome.FAILED,
        ),
    ],
)
def test_what_a_row_is_judged(row: Row, share: float | None, judged: Outcome) -> None:
    assert row.share == share and row.judged is judged


def test_a_row_survives_its_line() -> None:
    row = Row(what="a|b", outcome=Outcome.SKIPPED, value=1.5, unit="ms", target=2.0, note="why")
    assert read_row(row.line()) == row
    assert read_row(Row(what="x").line()) == Row(what="x")


@pytest.mark.parametrize("line", ["", "text", "{not json", '{"other": 1}', "[1]", '"{"'])
def test_other_lines_are_no_rows(line: str) -> None:
    assert read_row(line) is None


@pytest.mark.parametrize(
    "line",
    [
        '{"what": "a", "speed": 1}',
        '{"what": "a", "value": "1"}',
        '{"what": "a", "value": true}',
        '{"what": "a", "value": NaN}',
        '{"what": "a", "ceiling": Infinity}',
        '{"what": 1}',
        '{"what": "a", "outcome": "fine"}',
    ],
)
def test_rows_that_break_the_contract_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        read_row(line)


REPORT = Report(
    date="2026-12-01",
    card="A card, 80 GiB",
    seconds=123.4,
    stages={
        "Equality": [
            *(Row(what=f"check {n}") for n in range(300)),
            Row(what="bad|one", outcome=Outcome.FAILED, note="largest\nerror  0.3"),
        ],
        "Speed": [
            Row(what="copy", value=3.25, unit="TB/s", ceiling=4.0, target=0.9),
            Row(what="tokens", value=12345.6, unit="tokens/s", target=3.0),
        ],
    },
)


def test_equal_checks_are_folded_and_the_others_are_not() -> None:
    lines = as_text(REPORT).splitlines()
    assert len(lines) == 2 + 4 + 2
    assert lines[2].split() == ["Equality", "300", "checks", "ok"]
    assert "bad|one" in lines[3] and lines[3].endswith("largest error 0.3")
    assert lines[4].split() == [
        "Speed", "copy", "low", "3.25", "TB/s", "4", "TB/s", "81%", "90%",
    ]  # fmt: skip
    assert "12,346 tokens/s" in lines[5]
    assert lines[-1] == "2026-12-01, A card, 80 GiB: 301 ok, 1 low, 1 failed, 0 skipped, in 123 s"


def test_markdown_names_card_and_date_and_keeps_its_columns() -> None:
    text = as_markdown(REPORT)
    assert text.startswith("### A card, 80 GiB, 2026-12-01\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "bad\\|one" in text
    assert {line.replace("\\|", "").count("|") for line in rows} == {9}


def test_json_has_every_row() -> None:
    value = json.loads(as_json(REPORT))
    assert (value["card"], value["date"], len(value["rows"])) == (REPORT.card, REPORT.date, 303)
    copied = value["rows"][-2]
    assert copied["outcome"] == "low" and copied["share"] == 0.8125 and copied["stage"] == "Speed"
