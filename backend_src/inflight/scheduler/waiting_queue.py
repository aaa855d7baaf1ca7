"""Who goes first: the rank of a request, and the queue of those that hold no blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from inflight.batch import LlmRequest


def rank_of(arrival_time: float, priority: float, aging_seconds: float) -> float:
    """The rank of a request; the smaller goes first.

    rank = arrival_time - priority * aging_seconds: a request of priority p counts as if it had
    arrived p * aging_seconds earlier. Equal priorities are served in order of arrival, and since
    priorities lie in 0..1, nobody who arrives more than ``aging_seconds`` later can overtake: no
    request waits for ever. The rank never changes, so a paused request keeps its place.
    """
    return arrival_time - priority * aging_seconds


def rank_key(request: LlmRequest) -> tuple[float, int]:
    """The sort key of rank order: (rank, request_id), a total order."""
    return request.rank, request.request_id


class WaitingQueue:
    """The queued requests in rank order, new and paused ones alike.

    ``push`` and ``remove`` find the place by bisection. Iteration only reads and may be left early;
    while it runs the queue must not change.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._requests: dict[int, LlmRequest] = {}

    def push(self, request: LlmRequest) -> None:
        """Puts a request at the place of its rank; a paused one thereby gets its old place back."""
        assert request.request_id not in self._requests, "the request waits already"
        insort(self._keys, rank_key(request))
        self._requests[request.request_id] = request

    def remove(self, request: LlmRequest) -> None:
        """Takes out a request that waits here."""
        del self._requests[request.request_id]
        del self._keys[bisect_left(self._keys, rank_key(request))]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, LlmRequest) and request.request_id in self._requests

    def __iter__(self) -> Iterator[LlmRequest]:
        for _, request_id in self._keys:
            yield self._requests[request_id]
