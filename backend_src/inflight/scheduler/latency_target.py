"""LatencyTarget: how many context tokens an iteration may compute for running streams to keep pace.

With ``target_inter_token_ms`` the context tokens of an iteration that also generates are bounded by
what they are expected to cost (``IterationCost``), so that 19 of 20 iterations stay within it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inflight.batch import ScheduledBatch, ScheduledChunk
from inflight.scheduler.iteration_cost import IterationCost, IterationShape, generation_pairs

LEAST_CONTEXT_TOKENS = 8
"""An iteration reads all weights and the whole context anyway: fewer tokens save little."""


class LatencyTarget:
    """Three bounds, the smallest counts, and never less than ``LEAST_CONTEXT_TOKENS``:

    - the tokens whose expected cost, times ``tail_factor``, keeps to the target;
    - twice the most that were measured, since a model knows nothing of sizes it never saw;
    - ``max_num_tokens``, which is the caller's.

    Contexts thus always go on, also where the generations alone exceed the target.
    """

    def __init__(self, target_inter_token_ms: float) -> None:
        assert target_inter_token_ms > 0
        self._seconds = target_inter_token_ms / 1000
        self._cost = IterationCost()

    def observe(self, plan: ScheduledBatch, seconds: float) -> None:
        """The iteration of ``plan`` took so long."""
        if seconds > 0:
            self._cost.observe(IterationShape.of(plan), seconds)

    def context_tokens(self, generation: Sequence[ScheduledChunk], start: int) -> int:
        """Context tokens to compute beside ``generation`` (not empty), of contexts of which
        ``start`` tokens at most are computed already."""
        measured = self._cost.largest_context
        if not measured:
            return LEAST_CONTEXT_TOKENS
        alone = IterationShape(0, 0, len(generation), generation_pairs(generation))
        spare = self._seconds / self._cost.tail_factor() - self._cost.seconds(alone)
        return max(LEAST_CONTEXT_TOKENS, min(self._affordable(spare, start), 2 * measured))

    def _affordable(self, spare: float, start: int) -> int:
        """The largest n with per_token * n + per_pair * (n * start + n * n / 2) <= spare."""
        if spare <= 0:
            return 0
        per_token, per_pair = self._cost.context_coefficients()
        linear = per_token + per_pair * (start + 0.5)
        # The root of a quadratic, written so that per_pair may be 0.
        root = linear + math.sqrt(linear * linear + 2 * per_pair * spare)
        return int(2 * spare / root) if root > 0 else 2 * self._cost.largest_context
