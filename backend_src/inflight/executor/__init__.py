"""The Executor API: enqueue, await, cancel, shut down; and an offline ``generate`` on top."""

from inflight.executor.executor import Executor
from inflight.executor.offline import GenerationOutput

__all__ = ["Executor", "GenerationOutput"]
