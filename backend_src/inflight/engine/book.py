"""RequestBook: every request in the engine, where it stands, and when it must end."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from inflight.batch.llm_request import LlmRequest
from inflight.engine.record import RequestRecord
from inflight.scheduler.waiting_queue import WaitingQueue


def _order(llm: LlmRequest) -> tuple[float, int]:
    return llm.rank, llm.request_id


class RequestBook:
    """Started requests in rank order, the waiting queue, and the records by id."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self._started: list[LlmRequest] = []
        self._records: dict[int, RequestRecord] = {}
        self._with_deadline: dict[int, RequestRecord] = {}

    @property
    def started(self) -> list[LlmRequest]:
        """Requests that hold KV blocks, in rank order; not to be changed."""
        return self._started

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(list(self._records.values()))

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._records

    def get(self, request_id: int) -> RequestRecord | None:
        return self._records.get(request_id)

    def record_of(self, llm: LlmRequest) -> RequestRecord:
        return self._records[llm.request_id]

    def admit(self, record: RequestRecord) -> None:
        """A new request joins the queue."""
        self._records[record.llm.request_id] = record
        if record.deadline is not None:
            self._with_deadline[record.llm.request_id] = record
        self.waiting.push(record.llm)

    def start(self, llm: LlmRequest) -> None:
        """Out of the queue, among the started."""
        self.waiting.remove(llm)
        insort(self._started, llm, key=_order)

    def pause(self, llm: LlmRequest) -> None:
        """From the started back into the queue, at its own rank."""
        self._unstart(llm)
        llm.pause()
        self.waiting.push(llm)

    def remove(self, record: RequestRecord) -> None:
        """Out of the engine; call before the request's state changes to complete."""
        llm = record.llm
        if self._is_listed_as_started(llm):
            self._unstart(llm)
        else:
            self.waiting.remove(llm)
        del self._records[llm.request_id]
        self._with_deadline.pop(llm.request_id, None)

    def overdue(self, now: float) -> list[RequestRecord]:
        """Records whose deadline has passed."""
        return [
            r for r in self._with_deadline.values() if r.deadline is not None and r.deadline <= now
        ]

    def next_deadline(self) -> float | None:
        return min((r.deadline for r in self._with_deadline.values() if r.deadline), default=None)

    def _is_listed_as_started(self, llm: LlmRequest) -> bool:
        at = bisect_left(self._started, _order(llm), key=_order)
        return at < len(self._started) and self._started[at] is llm

    def _unstart(self, llm: LlmRequest) -> None:
        at = bisect_left(self._started, _order(llm), key=_order)
        assert self._started[at] is llm
        del self._started[at]
