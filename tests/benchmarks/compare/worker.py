"""The process that one system runs in: commands come as JSON lines, answers go as JSON lines.

    python -m tests.benchmarks.compare.worker DRIVER OPTIONS

Standard library only. The first answer says that the system is loaded; then each line
``{"workload": name, "salt": number, "door": text}`` is served and answered. The end of standard
input ends the process. Whatever the system itself prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.benchmarks.compare.driver import Driver, LoadOptions, make_driver
from tests.benchmarks.compare.workloads import make_workload, warm_up_of


def private_stdout() -> Callable[[dict[str, Any]], None]:
    """Keeps standard output for the answers alone, also from libraries that print."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return answer


class Worker:
    """Warms each workload up, untimed, before it is served for the first time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._warm: set[tuple[str, str]] = set()

    def serve(self, name: str, salt: int, door: str) -> dict[str, Any]:
        if (name, door) not in self._warm:
            self._driver.serve(warm_up_of(name), door)
            self._warm.add((name, door))
        return self._driver.serve(make_workload(name, salt), door).to_json()


def main() -> None:
    module, options = sys.argv[1:]
    answer = private_stdout()
    try:
        began = time.perf_counter()
        driver = make_driver(module, LoadOptions.from_json(json.loads(options)))
        loaded = time.perf_counter() - began
        answer({"load_s": loaded, "version": driver.version, "settings": driver.settings})
        worker = Worker(driver)
        try:
            for line in sys.stdin:
                command = json.loads(line)
                answer(worker.serve(command["workload"], command["salt"], command["door"]))
        finally:
            driver.close()
    except Exception as error:
        traceback.print_exc()  # into the worker's log
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        sys.stdout.flush()
        os._exit(1)  # some systems leave threads behind that would keep the process


if __name__ == "__main__":
    main()
