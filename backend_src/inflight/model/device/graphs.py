"""GenerationGraphs: iterations of generations alone, captured for some numbers of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from inflight.model.device.buckets import bucket_for
from inflight.model.device.runtime import DeviceRuntime, Outputs, Replay
from inflight.model.runner import PackedInputs

_LOG = logging.getLogger(__name__)


class GenerationGraphs:
    """Captured once, on buffers that stay where they are."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        sizes: Sequence[int],
        work_for: Callable[[int], Callable[[], Outputs]],
    ) -> None:
        """``work_for``: a number of rows -> what an iteration of so many generations does.

        The largest comes first: the others find room in its memory. Where memory runs out
        nevertheless, the rest is not captured: a larger graph serves fewer rows as well.
        """
        self._replays: dict[int, Replay] = {}
        for size in sorted(sizes, reverse=True):
            try:
                self._replays[size] = runtime.capture(work_for(size))
            except torch.OutOfMemoryError:
                _LOG.warning("no memory for CUDA graphs of %d rows and fewer", size)
                break
        self.sizes = tuple(sorted(self._replays))

    def bucket_for(self, inputs: PackedInputs) -> int | None:
        """Which graph's rows hold those of the iteration; None: it runs without a graph."""
        num_rows = len(inputs.token_ids)
        # Rows of logits_indices ascend: as many as there are rows are all of them, in order.
        if inputs.num_context_sequences or len(inputs.logits_indices) != num_rows:
            return None
        return bucket_for(num_rows, self.sizes)

    def replay(self, size: int) -> Outputs:
        """Of a bucket; its outputs are overwritten by the next replay of any."""
        captured = self._replays[size]
        captured.replay()
        return captured.outputs
