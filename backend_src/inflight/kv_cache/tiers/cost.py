"""OnboardCost: whether bringing blocks back is faster than computing their tokens again."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.kv_cache.tiers.cascade import Place

_WEIGHT = 0.2
"""Of the newest measurement."""
_TRY_AGAIN_AFTER = 64


class Rate:
    """Something per second, as it was measured lately: an exponentially weighted average of the
    time that one of it takes."""

    def __init__(self) -> None:
        self._seconds_each: float | None = None

    def observe(self, amount: int, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return  # nothing was done, or it was too short for the clock
        latest = seconds / amount
        if self._seconds_each is None:
            self._seconds_each = latest
        else:
            self._seconds_each += _WEIGHT * (latest - self._seconds_each)

    def seconds(self, amount: int) -> float | None:
        """Expected time; None before the first measurement."""
        return None if self._seconds_each is None else amount * self._seconds_each

    @property
    def per_second(self) -> float | None:
        return 1 / self._seconds_each if self._seconds_each else None


class OnboardCost:
    """Weighs bytes / measured bandwidth against tokens / measured context tokens per second.

    What was never measured is tried. So is every 64th onboarding that would be refused, or a disk
    that was slow once would never be measured again.
    """

    def __init__(self, block_bytes: int, tokens_per_block: int) -> None:
        self.context = Rate()
        """Context tokens."""
        self.bandwidth = {place: Rate() for place in Place}
        """Bytes: from host memory into the primary pool, from the disk into host memory."""
        self.block_bytes = block_bytes
        self._tokens_per_block = tokens_per_block
        self._num_refused = 0

    def num_worthwhile(self, places: Sequence[Place]) -> int:
        """Of blocks that follow each other and lie in ``places``, how many of the first to onboard:
        the number that saves most time, 0 where none does."""
        best, best_saving, saving = 0, 0.0, 0.0
        computing = self.context.seconds(self._tokens_per_block)
        for number, place in enumerate(places, 1):
            loading = self._seconds_to_load(place)
            if computing is None or loading is None:
                return len(places)
            saving += computing - loading
            if saving > best_saving:
                best, best_saving = number, saving
        if best == 0 and places:
            self._num_refused += 1
            if self._num_refused % _TRY_AGAIN_AFTER == 0:
                return len(places)
        return best

    def _seconds_to_load(self, place: Place) -> float | None:
        writing = self.bandwidth[Place.HOST].seconds(self.block_bytes)
        if place is Place.HOST or writing is None:
            return writing
        reading = self.bandwidth[place].seconds(self.block_bytes)
        return None if reading is None else reading + writing

    def seconds_to_compute(self, num_blocks: int) -> float | None:
        return self.context.seconds(num_blocks * self._tokens_per_block)
