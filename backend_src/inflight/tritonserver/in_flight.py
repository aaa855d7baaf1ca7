"""InFlight: which Triton requests are being answered, and by which requests of the engine."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.api.request import Request
from inflight.errors import DuplicateRequestError, ShuttingDownError
from inflight.tritonserver.parsed import Door, RawRequest, Wants
from inflight.tritonserver.reply import Reply

if TYPE_CHECKING:
    from inflight.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What the responses of one Triton request look like."""

    door: Door
    streaming: bool
    num_elements: int
    """Batch elements; each is a request of its own to the engine."""
    wants: Wants
    requested_outputs: frozenset[str]


class TritonRequest:
    """One Triton request from ``execute`` to its FINAL. ``InFlight`` alone changes it."""

    __slots__ = (
        "triton_request_id", "shape", "reply", "received_ns", "cancelled", "engine_ids",
        "num_unanswered",
    )  # fmt: skip

    def __init__(self, raw: RawRequest, door: Door, reply: Reply) -> None:
        self.triton_request_id = raw.triton_request_id or uuid.uuid4().hex
        self.shape = ReplyShape(
            door=door,
            streaming=raw.streaming,
            num_elements=len(raw.elements),
            wants=raw.wants,
            requested_outputs=raw.requested_outputs,
        )
        self.reply = reply
        self.received_ns = time.monotonic_ns()
        self.cancelled = False
        self.engine_ids: tuple[int, ...] = ()
        """() until the executor has taken all elements."""
        self.num_unanswered = len(raw.elements)
        """Elements without a final response so far."""


class Element:
    """One batch element: the engine's request behind it and what it has been told."""

    __slots__ = ("owner", "batch_index", "num_output_tokens")

    def __init__(self, owner: TritonRequest, batch_index: int) -> None:
        self.owner = owner
        self.batch_index = batch_index
        self.num_output_tokens = 0


class InFlight:
    """Thread-safe. A Triton request is in it from ``open`` until just before its FINAL is sent."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._by_triton_id: dict[str, TritonRequest] = {}
        self._elements: dict[int, Element] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_triton_id)

    @property
    def num_elements(self) -> int:
        """Requests that the executor has not answered yet."""
        return len(self._elements)

    def open(self, request: TritonRequest) -> None:
        """Raises DuplicateRequestError or ShuttingDownError."""
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError("the server is shutting down and takes no more requests")
            if request.triton_request_id in self._by_triton_id:
                raise DuplicateRequestError(
                    f"id: {request.triton_request_id[:80]!r} is already in flight; "
                    "wait for its end, or send another id"
                )
            self._by_triton_id[request.triton_request_id] = request

    def enqueue(self, request: TritonRequest, engine_requests: Sequence[Request]) -> bool:
        """Hands all elements to the executor, or none. False: cancelled before that.

        Raises the executor's RequestError; elements that it had taken are cancelled then.
        """
        taken: list[int] = []
        # Under the lock, so that the pump cannot look up an element that is not recorded yet, and
        # a stop either sees all elements or prevents them.
        with self._lock:
            if request.cancelled or request.reply.is_finished:
                return False
            try:
                for engine_request in engine_requests:
                    taken.append(self._executor.enqueue_request(engine_request))
            except Exception:
                for engine_id in taken:
                    self._executor.cancel_request(engine_id)
                raise
            request.engine_ids = tuple(taken)
            self._elements.update(
                (engine_id, Element(request, index)) for index, engine_id in enumerate(taken)
            )
        return True

    def find(self, engine_id: int) -> Element | None:
        """None: answered already, or never completely taken."""
        with self._lock:
            return self._elements.get(engine_id)

    def end_element(self, engine_id: int) -> bool:
        """The element's final response is about to be sent; True: it is its request's last."""
        with self._lock:
            owner = self._elements.pop(engine_id).owner
            owner.num_unanswered -= 1
            if owner.num_unanswered == 0:
                self._forget(owner)
            return owner.num_unanswered == 0

    def end(self, request: TritonRequest) -> None:
        """The whole request is about to be answered for good; its id may be used again."""
        with self._lock:
            for engine_id in request.engine_ids:
                self._elements.pop(engine_id, None)
            self._forget(request)

    def cancel(self, request: TritonRequest) -> None:
        """Every element ends as CANCELLED, or is never enqueued. May be called again."""
        with self._lock:
            if request.cancelled:
                return
            request.cancelled = True
            engine_ids = request.engine_ids
        for engine_id in engine_ids:
            self._executor.cancel_request(engine_id)

    def cancel_by_id(self, triton_request_id: str) -> None:
        """``cancel`` of the request with this id; unknown ids are ignored."""
        with self._lock:
            request = self._by_triton_id.get(triton_request_id)
        if request is not None:
            self.cancel(request)

    def close(self) -> None:
        """``open`` raises from now on."""
        with self._lock:
            self._is_closed = True

    def requests(self) -> list[TritonRequest]:
        """Those in flight now, oldest first."""
        with self._lock:
            return list(self._by_triton_id.values())

    def _forget(self, request: TritonRequest) -> None:
        if self._by_triton_id.get(request.triton_request_id) is request:
            del self._by_triton_id[request.triton_request_id]
