"""From ``model_dir`` to a checkpoint folder that can be served. See README.md of this folder."""

from inflight.checkpoint.metadata import Checkpoint
from inflight.checkpoint.prepare import prepare_checkpoint

__all__ = ["Checkpoint", "prepare_checkpoint"]
