"""Tells the engine's stub that the server is about to stop, while clients can still be answered.

On SIGTERM the server waits for the requests in flight, and ends hard when its exit timeout is over:
nobody would tell their clients. So the supervisor sends SHUTDOWN_SIGNAL to the engine's stub first.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

SHUTDOWN_SIGNAL = signal.SIGUSR1
"""Sent by ``cli.server_process``."""


def call_at_shutdown_signal(shut_down: Callable[[], None]) -> None:
    """Starts a thread that calls ``shut_down`` once when the signal comes.

    The stub's main thread waits in C++ and would run a Python handler only with the next request,
    so the interpreter's own C handler wakes the thread through a pipe. Must be called in the main
    thread; elsewhere it does nothing but log, and a stop of the server is less polite.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(SHUTDOWN_SIGNAL, lambda number, frame: None)
    except ValueError:
        logger.warning("not in the main thread: a stop of the server will not be announced")
        os.close(read_end)
        os.close(write_end)
        return

    def wait() -> None:
        while SHUTDOWN_SIGNAL not in os.read(read_end, 64):
            pass
        logger.info("the server is about to stop: answering everyone")
        shut_down()

    threading.Thread(target=wait, name="inflight-shutdown-signal", daemon=True).start()
