"""Ending in order when somebody asks us to stop, and waiting until somebody does."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any, NoReturn

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_in_order() -> None:
    """From now on the first of SIGINT, SIGTERM and SIGHUP ends this process by an exception, so
    that it removes what it has not finished, and ends what it has started.

    While it does, SIGTERM and SIGHUP are ignored, and another SIGINT kills at once: after a Ctrl-C,
    which a terminal gives to parent and child, the parent asks the child again. A signal that is
    ignored stays so. For process 1 of a container, which has no defaults, this is needed to end.
    """
    for number in _heeded():
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    for later in _heeded():
        signal.signal(later, signal.SIG_DFL if later == signal.SIGINT else _is_ending)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _is_ending(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, no child inherits it."""


def _heeded() -> list[signal.Signals]:
    return [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class StopRequested(Exception):
    """Somebody asked us to stop; raised by StopSignals.sleep alone."""


class StopSignals:
    """A context manager inside which SIGINT, SIGTERM and SIGHUP are waited for, never handled.

    One that comes between two waits is kept for the next. A signal that the caller ignores (nohup,
    a shell's background job) stays ignored. For the main thread only; other threads may exist: the
    number comes through a pipe, whichever thread the kernel picks for it.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._received: deque[int] = deque()

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _heeded():
            self._previous[number] = signal.signal(number, _leave_it_to_the_pipe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> signal.Signals | None:
        """The signal that came within ``seconds``; None when none did."""
        deadline = time.monotonic() + seconds
        while not self._received:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._reader], [], [], remaining)[0]:
                return None
            # Handlers of others, such as a timer's, write to the pipe too.
            numbers = os.read(self._reader, 64)
            self._received.extend(number for number in numbers if number in self._previous)
        return signal.Signals(self._received.popleft())

    def sleep(self, seconds: float) -> None:
        """Returns after ``seconds``. Raises StopRequested as soon as a signal comes."""
        if self.wait(seconds) is not None:
            raise StopRequested


def _leave_it_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wakeup pipe only for signals that have a handler."""
