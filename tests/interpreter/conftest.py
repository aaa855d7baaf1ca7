"""What the kernels were seen doing, at the end of a run."""

from __future__ import annotations

import pytest

PASSED: pytest.StashKey[list[object]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PASSED] = []


@pytest.fixture
def passed(request: pytest.FixtureRequest) -> list[object]:
    """Where a test puts the cases that it has seen pass."""
    return request.config.stash[PASSED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cases = terminalreporter.config.stash[PASSED]
    if cases:
        from tests.interpreter.all_cases import coverage_lines

        terminalreporter.section("kernels that equal torch under the interpreter")
        terminalreporter.write("\n".join(coverage_lines(cases)) + "\n")
