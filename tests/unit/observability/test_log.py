from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from inflight.observability import log


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    root = logging.getLogger(log.ROOT_LOGGER)
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_an_event_is_one_line_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.getLogger("inflight.engine.loop").info(
        "engine %s", "ready", extra={"facts": {"num_blocks": 9, "dtype": "fp32"}}
    )
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info inflight\.engine\.loop: "
        r"engine ready num_blocks=9 dtype=fp32\n",
        line,
    )


def test_line_breaks_cannot_forge_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.getLogger("inflight.x").warning("a\nb\r\\n")
    assert capsys.readouterr().err.endswith("inflight.x: a\\nb\\r\\\\n\n")


def test_a_traceback_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    try:
        raise ValueError("inner")
    except ValueError as error:
        logging.getLogger("inflight.x").error("failed", exc_info=error)
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "failed Traceback" in text and "ValueError: inner" in text


def test_very_long_lines_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.getLogger("inflight.x").error("y" * 100_000)
    text = capsys.readouterr().err
    assert len(text) < 10_000 and text.endswith("...\n")


def test_the_level_holds_and_configuring_again_does_not_double(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure("debug")
    log.configure("warning")
    logging.getLogger("inflight.x").info("quiet")
    logging.getLogger("inflight.x").warning("loud")
    assert capsys.readouterr().err.count("\n") == 1
