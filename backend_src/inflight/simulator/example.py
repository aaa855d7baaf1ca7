"""The built-in trace and cost model: what ``inflight simulate --example`` runs."""

from __future__ import annotations

from inflight.simulator.cost_model import CostModel
from inflight.simulator.trace import TraceRequest
from inflight.simulator.traffic import Lengths, Traffic

EXAMPLE_COST = CostModel(
    base_seconds=8e-3,
    context_token_seconds=2.5e-4,
    generation_row_seconds=4e-4,
    context_pair_seconds=5e-8,
    generation_pair_seconds=4e-7,
)
"""Round numbers of the size that the embedded model has on two cores; ``--calibrate`` measures."""

EXAMPLE_BLOCKS = 384
"""Too few blocks for 64 requests of the example at once: the policies differ."""

EXAMPLE_MAX_SEQ_LEN = 4096


def example_trace() -> list[TraceRequest]:
    """600 requests from a seeded generator, more than the example's KV pool can serve."""
    traffic = Traffic(
        input_lengths=Lengths.parse("input lengths", "p50=200,p95=800"),
        output_lengths=Lengths.parse("output lengths", "p50=300,p95=900"),
        requests_per_second=2.4,
        shared_prefix=128,
        num_groups=4,
    )
    return traffic.trace(600, seed=1, max_seq_len=EXAMPLE_MAX_SEQ_LEN)
