"""CostModel: how long an iteration takes, from what it computes; in place of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from inflight.errors import ConfigError
from inflight.scheduler.iteration_cost import IterationShape
from inflight.simulator.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """seconds = base + max(weight_read, context_token * context tokens + generation_row * rows)
    + context_pair * context pairs + generation_pair * generation pairs

    A pair is a row and a token that it attends to. Contexts and generations have a coefficient
    each: attention over a context is a product of matrices, that of a generation reads the KV of
    its whole sequence once. ``weight_read`` is the floor of the linear layers: however few rows
    there are, the weights are read from memory once.
    """

    base_seconds: float
    context_token_seconds: float
    generation_row_seconds: float
    context_pair_seconds: float
    generation_pair_seconds: float
    weight_read_seconds: float = 0.0
    """0 where the other coefficients were measured, and ``base_seconds`` holds it."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{item.name}: {value!r} must be 0 or larger")
        least = (IterationShape(1, 1, 0, 0), IterationShape(0, 0, 1, 1))
        if not all(self.seconds(shape) > 0 for shape in least):
            raise ConfigError("the cost model: an iteration must take more than 0 seconds")

    def seconds(self, shape: IterationShape) -> float:
        """What an iteration of this shape takes."""
        linear = (
            self.context_token_seconds * shape.num_context_tokens
            + self.generation_row_seconds * shape.num_generations
        )
        return (
            self.base_seconds
            + max(self.weight_read_seconds, linear)
            + self.context_pair_seconds * shape.num_context_pairs
            + self.generation_pair_seconds * shape.num_generation_pairs
        )


def derived_cost(
    model: ModelShape, *, flops_per_second: float, bytes_per_second: float, base_seconds: float
) -> CostModel:
    """The roofline: two operations for each weight and row, every weight read once an iteration,
    the KV of a generation read once, and four operations for each pair and attention channel
    (queries by keys, weights by values).

    ``flops_per_second`` and ``bytes_per_second`` are what the machine sustains, not its peak.
    Raises ConfigError unless they are positive.
    """
    for name, value in (("--flops", flops_per_second), ("--bandwidth", bytes_per_second)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}: {value!r} must be larger than 0")
    row_seconds = 2 * model.num_active_weights / flops_per_second
    return CostModel(
        base_seconds=base_seconds,
        context_token_seconds=row_seconds,
        generation_row_seconds=row_seconds,
        context_pair_seconds=4 * model.attention_channels / flops_per_second,
        generation_pair_seconds=model.kv_bytes_per_token / bytes_per_second,
        weight_read_seconds=model.weight_bytes / bytes_per_second,
    )
