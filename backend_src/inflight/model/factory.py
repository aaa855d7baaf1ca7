"""load_runner: from a checkpoint folder and the configuration to a runner that has been probed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from inflight.api.config import InflightConfig
from inflight.model.attention import AttentionBackend
from inflight.model.hf_runner import HfRunner
from inflight.model.loading import choose_device, choose_dtype, load_model
from inflight.model.packed_model import PackedModel
from inflight.model.probe import probe
from inflight.model.torch_attention import TorchAttention

ATTENTION_BACKENDS: Mapping[str, Callable[[torch.dtype, torch.device], AttentionBackend]] = {
    "torch": TorchAttention,
}
"""By the values of the configuration key ``attention_backend``."""

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def load_runner(checkpoint_directory: Path, config: InflightConfig) -> HfRunner:
    """Loads the weights, checks that packed logits are right, and sets torch's thread count.

    The runner has no KV cache yet. Raises CheckpointError when the checkpoint cannot be served.
    """
    torch.set_num_threads(config.num_threads or usable_cores())
    device = choose_device()
    dtype = choose_dtype(config.dtype, device)
    make_backend = ATTENTION_BACKENDS[config.attention_backend]
    model = PackedModel(load_model(checkpoint_directory, dtype=dtype, device=device))
    probe(model, make_backend(dtype, device))
    return HfRunner(model, make_backend(dtype, device))


def usable_cores() -> int:
    """Cores that this process may use: its affinity, capped by the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA_FILE.read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max": no quota
        return cores
