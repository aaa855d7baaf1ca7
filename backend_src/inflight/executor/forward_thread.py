"""ForwardThread: the thread that computes while the engine thread delivers and takes in."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from inflight.engine.lane import ForwardWork
from inflight.sampling.sampler import SampledTokens


class ForwardThread:
    """A ForwardLane, inside of ``with``: the thread lives as long as the block."""

    def __init__(self) -> None:
        self._work: SimpleQueue[ForwardWork | None] = SimpleQueue()
        self._outcomes: SimpleQueue[SampledTokens | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inflight-forward", daemon=True)

    def __enter__(self) -> ForwardThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._work.put(None)
        self._thread.join()

    def start(self, work: ForwardWork) -> None:
        self._work.put(work)

    def wait(self) -> SampledTokens:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            outcome: SampledTokens | BaseException
            try:
                outcome = work()
            except BaseException as error:  # it belongs to the thread that waits
                outcome = error
            self._outcomes.put(outcome)
            del work, outcome  # an iteration's arrays are not kept until the next one
