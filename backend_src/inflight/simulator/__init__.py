"""A trace through the engine's own scheduler and KV books, without a model. See README.md."""

from inflight.simulator.arrivals import Arrivals, ClosedArrivals, OpenArrivals
from inflight.simulator.cost_model import CostModel
from inflight.simulator.model_shape import ModelShape
from inflight.simulator.outcome import Outcome
from inflight.simulator.simulation import Simulation
from inflight.simulator.tiers import Bandwidth, TierSpeeds
from inflight.simulator.trace import TraceError, TraceRequest

__all__ = [
    "Arrivals",
    "Bandwidth",
    "ClosedArrivals",
    "CostModel",
    "ModelShape",
    "OpenArrivals",
    "Outcome",
    "Simulation",
    "TierSpeeds",
    "TraceError",
    "TraceRequest",
]
