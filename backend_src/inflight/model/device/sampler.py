"""DeviceSampler: tokens and log-probs of an iteration's rows, made where their logits are."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.batch.device_sampling import LARGEST_LOGIT, SamplingRoom
from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.ops import DeviceOps


class DeviceSampler:
    """Owns how often each id occurs in the sequences that have penalties. Launches work, and waits
    for nothing that the operations do not wait for."""

    def __init__(self, room: SamplingRoom, vocab_size: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError on a GPU without room for 4 bytes of each id and slot."""
        self.room = room
        shape = (room.num_slots, vocab_size)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def sample(
        self, ops: DeviceOps, logits: Tensor, likeliest: Tensor, rows: SamplingRows
    ) -> Tensor:
        """int32[3, R]: the ids, the bits of the log-probs in fp32, and 1 for each row that is left.

        ``logits``: fp32[R, vocab_size], raw; those of rows that are left stay so, the others are
        overwritten. ``likeliest``: what ``DeviceOps.likeliest`` makes of them; a row whose largest
        is NaN or beyond +-LARGEST_LOGIT is left. ``rows.counts`` are this sampler's.
        """
        answers = likeliest.new_zeros(3, len(logits))
        ids, log_probs, is_left = answers[0], answers[1].view(torch.float32), answers[2]
        is_usable = likeliest[1].view(torch.float32).abs() <= LARGEST_LOGIT
        is_left.copy_((rows.is_left != 0) | ~is_usable)
        rows = rows.with_left(is_left)
        ops.edit_logits(logits, rows)
        ops.sample(logits, rows, ids, log_probs)
        return answers
