"""What transformers' classes leave for the KV cache on a device with memory of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from inflight.model.attention import AttentionBackend
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.device.sizing import free_beside, largest_inputs
from inflight.model.device.staging import RowLimits
from inflight.model.packed_model import PackedModel


def measure_hf_kv_memory(
    model: PackedModel,
    new_backend: Callable[[], AttentionBackend],
    limits: RowLimits,
    max_seq_len: int,
    runtime: DeviceRuntime,
) -> int | None:
    """Bytes that the KV cache may take beside the largest forward, which runs on storage of its
    own. None: the device has no memory of its own.

    Raises ConfigError or torch.OutOfMemoryError where not even that forward fits.
    """
    if runtime.memory is None:
        return None

    def make_forward() -> Callable[[], Tensor]:
        inputs = largest_inputs(limits, max_seq_len)
        backend = new_backend()
        backend.allocate(
            model.layers,
            num_blocks=int(inputs.slot_mapping.max()) // limits.tokens_per_block + 1,
            tokens_per_block=limits.tokens_per_block,
        )
        return lambda: model.forward(inputs, backend).float()

    return max(0, free_beside(runtime.memory, make_forward))
