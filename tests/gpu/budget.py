"""When the suite will end this stage."""

from __future__ import annotations

import math
import os
import threading
import time

from tests.gpu.rows import Outcome, Row, emit

END_VARIABLE = "GPU_STAGE_END"
"""Environment variable that the suite sets: the end of the stage on ``time.monotonic``, which all
processes of a machine share."""
_LAST_SECONDS = 3.0


def seconds_left() -> float:
    """Infinite for a stage that was started by hand."""
    end = os.environ.get(END_VARIABLE)
    return float(end) - time.monotonic() if end else math.inf


def skip_rest_in_time(what: str) -> None:
    """Of a stage that gets only what others left over: shortly before its end it says so in a row,
    and ends, whatever it does then."""
    seconds = seconds_left() - _LAST_SECONDS
    if math.isinf(seconds):
        return

    def end() -> None:
        note = "the suite's time was used up before the rest of it"
        emit(Row(what=what, outcome=Outcome.SKIPPED, note=note))
        os._exit(0)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
