"""Ours and the peers that are installed, on the same workloads, interleaved in one run.

    bash scripts/bench --workloads W1,W2c8 --peers all --dtype bf16 --repeat 5 --json FILE

tests/benchmarks/compare/README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from inflight.checkpoint import prepare_checkpoint
from tests.benchmarks.compare.comparison import Comparison, Plan, write_json
from tests.benchmarks.compare.fleet import Fleet
from tests.benchmarks.compare.picture import INSTALL_LINE, draw, has_matplotlib
from tests.benchmarks.compare.systems import (
    DTYPES,
    OURS,
    PEERS,
    NotInstalledError,
    choose_peers,
    our_systems,
    peers_home,
)
from tests.benchmarks.compare.workloads import NAMES

TURN_SECONDS = 1200.0
RESULTS = Path("results")
"""Below the folder the command runs in; git ignores it."""


def names_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: names with commas between them, each one of ``allowed``."""

    def names(text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(allowed)}")
        return asked

    return names


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or larger")
    return number


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--workloads", type=names_of(NAMES), default=list(NAMES), help=f"of {','.join(NAMES)}")
    add("--ours", type=names_of(OURS), default=list(OURS), help=f"of {','.join(OURS)}")
    add("--peers", default="none", help=f"none, all, or names of {','.join(PEERS)}")
    add("--dtype", choices=DTYPES, default="bf16", help="the peers' nearest kind is taken")
    add("--repeat", type=positive, default=3)
    add("--budget", type=float, default=300, help="seconds of a workload after which a system "
        "gets no further repeat of it")  # fmt: skip
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    add("--json", type=Path, default=RESULTS / "bench.json",
        help="where the rows go; an older file is replaced (%(default)s)")  # fmt: skip
    add("--png", type=Path, default=RESULTS / "bench.png",
        help="where the picture goes (%(default)s)")  # fmt: skip
    return parser.parse_args(arguments)


def say(line: str) -> None:
    print(line, flush=True)


def exit_once(number: int, frame: FrameType | None) -> NoReturn:
    """Ends by the way of all exits; a second signal does not disturb the clearing up."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def compare(asked: argparse.Namespace, plan: Plan) -> int:
    """The exit code: 1 where a system failed."""
    with Fleet(
        str(plan.checkpoint), plan.threads, plan.scratch, turn_seconds=TURN_SECONDS, say=say
    ) as fleet:
        comparison = Comparison(plan, fleet, say)
        for name in plan.workloads:
            comparison.run_workload(name)
            write_json(comparison.rows, asked.json)
    for failure in comparison.failures:
        say(f"failed: {failure}")
    say(f"rows: {asked.json}")
    if comparison.rows and has_matplotlib():
        title = f"SmolLM2-135M-Instruct, {plan.dtype}, {plan.threads} threads"
        draw(comparison.rows, comparison.least, title, asked.png)
        say(f"picture: {asked.png}")
    return 1 if comparison.failures else 0


def main() -> None:
    asked = parse(sys.argv[1:])
    try:
        peers = choose_peers(asked.peers, asked.dtype, peers_home(), say)
    except (NotInstalledError, ValueError) as error:
        sys.exit(f"error: {error}")
    if not has_matplotlib():
        say(f"there will be no picture: {INSTALL_LINE}")
    signal.signal(signal.SIGTERM, exit_once)
    scratch = Path(tempfile.mkdtemp(prefix="inflight-bench-"))
    say(f"logs of the systems: {scratch}")
    plan = Plan(
        checkpoint=prepare_checkpoint("", "", progress=say).directory,
        workloads=asked.workloads,
        systems=[*(s for s in our_systems(asked.dtype) if s.name in asked.ours), *peers],
        dtype=asked.dtype,
        repeat=asked.repeat,
        budget=asked.budget,
        threads=asked.threads,
        scratch=scratch,
    )
    sys.exit(compare(asked, plan))


if __name__ == "__main__":
    main()
