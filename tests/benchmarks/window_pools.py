"""What sliding windows save: python -m tests.benchmarks.window_pools

Two models, by the sizes of their layers: one whose layers all have a window of 4,096 tokens, and
one with a window of 512 in five layers of six. For the same memory: how many requests of some
length generate at once, and how fast a simulated load of long requests is served, with windows and
with layers that keep everything. Both are computed by the engine's own sizing, scheduler and KV
books; times are those of the example's cost model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.api import ExecutorConfig, KvCacheConfig
from inflight.api.kv_pools import KvGroup, group_layers
from inflight.engine.memory import KvMemory, num_fitting
from inflight.engine.pools import kv_pools, layer_groups
from inflight.simulator import OpenArrivals, Outcome, Simulation
from inflight.simulator.example import EXAMPLE_COST
from inflight.simulator.trace import TraceRequest

GIB = 1 << 30
LENGTHS = (1024, 8192, 32768)
NUM_REQUESTS, PROMPT_LENGTH, NUM_TOKENS = 40, 6_000, 1_500


@dataclass(frozen=True)
class Shape:
    """``engine.pools.LayeredModel``."""

    name: str
    num_layers: int
    kv_bytes_per_token: int
    layer_groups: tuple[KvGroup, ...]


def shape(name: str, windows: Sequence[int | None], bytes_per_layer: int) -> Shape:
    sizes = [bytes_per_layer] * len(windows)
    return Shape(name, len(windows), sum(sizes), group_layers(windows, sizes))


MODELS = (
    shape("32 layers with a window of 4,096", [4096] * 32, 4096),
    shape("26 layers, 22 with a window of 512", [*[*[512] * 5, None] * 4, 512, 512], 1024),
)
LIMITS = ExecutorConfig(
    max_batch_size=64,
    max_num_tokens=512,
    max_seq_len=32768,
    kv_cache_config=KvCacheConfig(tokens_per_block=32, free_memory_fraction=1.0),
)


def simulated(groups: Sequence[KvGroup], num_blocks: int) -> Outcome:
    trace = [TraceRequest(0.1 * i, PROMPT_LENGTH, NUM_TOKENS) for i in range(NUM_REQUESTS)]
    simulation = Simulation(LIMITS, EXAMPLE_COST, num_blocks=num_blocks, groups=groups)
    return simulation.run(OpenArrivals(trace))


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for model in MODELS:
        free_bytes = 4 * GIB
        print(f"{model.name}, {free_bytes // GIB} GiB of KV")
        speeds = []
        everything = (KvGroup(None, tuple(range(model.num_layers)), model.kv_bytes_per_token),)
        for name, groups in (("windows", layer_groups(model, LIMITS)), ("all kept", everything)):
            pools, _ = kv_pools(LIMITS, groups, KvMemory(free_bytes))
            fits = {length: num_fitting(pools, length, 32) for length in LENGTHS}
            outcome = simulated(groups, pools[0].num_blocks)
            speeds.append(outcome.tokens_per_second)
            print(
                f"  {name:9} blocks {[pool.num_blocks for pool in pools]}, requests that fit by "
                f"length {fits}; {outcome.tokens_per_second:.1f} tokens/s, batch fill "
                f"{outcome.batch_fill:.0%}"
            )
        print(f"  ratio of tokens/s: {speeds[0] / speeds[1]:.2f}")


if __name__ == "__main__":
    main()
