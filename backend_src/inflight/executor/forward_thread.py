"""ForwardThread: the thread that computes while the engine thread delivers and takes in."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from inflight.engine.lane import ForwardWork
from inflight.sampling.sampler import SampledTokens


class ForwardThread:
    """A ForwardLane, inside of ``with``: the thread lives as long as the block.

    ``start`` returns when the work is launched. Before that both threads would need the
    interpreter, and who calls keeps it: the work would begin when everything else is done.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[ForwardWork | None] = SimpleQueue()
        self._outcomes: SimpleQueue[SampledTokens | BaseException] = SimpleQueue()
        self._launched = threading.Lock()
        """Held but for the moment when ``start`` may return."""
        self._launched.acquire()
        self._is_awaited = False
        self._thread = threading.Thread(target=self._run, name="inflight-forward", daemon=True)

    def __enter__(self) -> ForwardThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._work.put(None)
        self._thread.join()

    def start(self, work: ForwardWork) -> None:
        self._is_awaited = True
        self._work.put(work)
        self._launched.acquire()

    def wait(self) -> SampledTokens:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            outcome: SampledTokens | BaseException
            try:
                outcome = work(self._let_start_return)
            except BaseException as error:  # it belongs to the thread that waits
                outcome = error
            self._let_start_return()  # of work that was over before it was launched
            self._outcomes.put(outcome)
            del work, outcome  # an iteration's arrays are not kept until the next one

    def _let_start_return(self) -> None:
        """Called on this thread only; after the first time of a piece of work it does nothing."""
        if self._is_awaited:
            self._is_awaited = False
            self._launched.release()
