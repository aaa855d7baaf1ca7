"""Ends a stub process whose server has died."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
GRACE_SECONDS = 2.0
"""For the stub's own end, which also removes its shared memory."""
EXIT_CODE = 71
"""Of a stub that lost its server (EX_OSERR)."""


@functools.cache
def exit_when_orphaned() -> None:
    """Starts a thread, once in this process, that ends the process when its parent has gone.

    The stub has a way of its own, but it deadlocks while one of our threads waits for the server in
    a send or a look at a cancellation, which at load is nearly always. Such a stub would keep its
    memory and, with the engine in it, its cores for ever.
    """
    thread = threading.Thread(
        target=watch, args=(os.getppid, os._exit), name="inflight-orphan-watch", daemon=True
    )
    thread.start()


def watch(
    parent_of_this: Callable[[], int],
    exit_process: Callable[[int], object],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Calls ``exit_process`` soon after ``parent_of_this`` has changed its answer."""
    parent = parent_of_this()
    while parent_of_this() == parent:
        sleep(PERIOD_SECONDS)
    sleep(GRACE_SECONDS)
    logger.critical("the server has gone: ending this process with %d", EXIT_CODE)
    exit_process(EXIT_CODE)
