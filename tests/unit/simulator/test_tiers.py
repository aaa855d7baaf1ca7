"""KV tiers in a simulation: moves take the time that their bytes say, and pay where they should."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    KvCachePausePolicy,
    KvTiersConfig,
    SchedulerConfig,
)
from inflight.errors import ConfigError
from inflight.kv_cache.tiers.cascade import WRITE_QUEUE_BYTES
from inflight.simulator import (
    Bandwidth,
    CostModel,
    OpenArrivals,
    Outcome,
    Simulation,
    TierSpeeds,
)
from inflight.simulator.clock import SimulatedClock
from inflight.simulator.comparison import compare_policies, comparison_json, comparison_lines
from inflight.simulator.tiers import SimulatedDisk, SimulatedReader, SimulatedWriter
from inflight.simulator.trace import PrefixPiece, TraceRequest
from inflight.simulator.traffic import Lengths, Traffic
from tests.unit.kv_cache.tiers.tier_blocks import BLOCK_BYTES, tier_block

TOKENS_PER_BLOCK, KV_BYTES = 4, 1000
POOL_BLOCKS = 12
COST = CostModel(
    base_seconds=0.01,
    context_token_seconds=0.01,
    generation_row_seconds=0.0,
    context_pair_seconds=0.0,
    generation_pair_seconds=0.0,
)


def make_config(*, host_blocks: int = 0, disk_blocks: int = 0) -> ExecutorConfig:
    block_bytes = TOKENS_PER_BLOCK * KV_BYTES
    tiers = KvTiersConfig(
        host_memory_bytes=host_blocks * block_bytes,
        disk_bytes=disk_blocks * block_bytes,
        disk_path="nowhere",
    )
    return ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=32,
        max_seq_len=48,
        kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, tiers=tiers),
    )


def in_turn(rounds: int) -> list[TraceRequest]:
    """Six prompts of six blocks, one after the other: three times the pool."""
    return [
        TraceRequest(100.0 * number, 24, 1, (PrefixPiece(f"prompt {number % 6}", 24),))
        for number in range(6 * rounds)
    ]


def run(config: ExecutorConfig, *, host: float = 1e9, disk: float = 1e9) -> Outcome:
    speeds = TierSpeeds(
        kv_bytes_per_token=KV_BYTES, host=Bandwidth.both(host), disk=Bandwidth.both(disk)
    )
    simulation = Simulation(config, COST, num_blocks=POOL_BLOCKS, tier_speeds=speeds)
    return simulation.run(OpenArrivals(in_turn(4)))


def test_a_working_set_three_times_the_pool_hits_as_far_as_the_tiers_reach() -> None:
    without = run(make_config())
    small = run(make_config(host_blocks=6))
    host = run(make_config(host_blocks=100))
    both = run(make_config(host_blocks=6, disk_blocks=100))
    assert without.cache_hit_rate == small.cache_hit_rate == 0
    # Of the six blocks of a prompt the last is computed; the first round of four finds nothing.
    assert host.cache_hit_rate == both.cache_hit_rate == pytest.approx(3 / 4 * 5 / 6)
    assert without.tiers == () and without.onboarding is None
    assert host.num_onboarded_tokens == {"host": 18 * 20}
    assert both.num_onboarded_tokens["host"] == 0
    assert both.num_onboarded_tokens["disk"] == 18 * 20
    assert both.time_to_first_token.p50 < without.time_to_first_token.p50 / 2


def test_what_moves_takes_its_time() -> None:
    """Five blocks of 4 kB at 1 MB/s are 20 ms from host memory, and as much from the disk before
    that; six blocks are evicted for them, each into host memory, for 4 ms."""
    computed = 0.01 + 24 * 0.01
    assert run(make_config()).time_to_first_token.p50 == pytest.approx(computed)
    rest = 0.01 + 4 * 0.01
    assert run(make_config(host_blocks=100), host=1e6).time_to_first_token.p50 == pytest.approx(
        rest + 5 * 0.004, abs=1e-6
    )
    from_disk = run(make_config(disk_blocks=100), host=1e6, disk=1e6)
    assert from_disk.time_to_first_token.p50 == pytest.approx(rest + 2 * 5 * 0.004, abs=0.006)


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    slow = run(make_config(host_blocks=100), host=20e3)  # 200 ms a block; 40 ms to compute it
    assert slow.onboarding is not None and slow.onboarding.recompute_decisions > 10
    late = run(make_config(disk_blocks=100), disk=20e3)
    assert late.onboarding is not None and late.onboarding.late_loads > 0
    assert late.num_completed == 24


@pytest.mark.parametrize("pause_policy", KvCachePausePolicy)
def test_a_crowded_pool_with_all_tiers_serves_everyone_and_always_alike(
    pause_policy: KvCachePausePolicy,
) -> None:
    config = make_config(host_blocks=8, disk_blocks=60)
    kv = config.kv_cache_config
    config = replace(
        config,
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        kv_cache_config=replace(kv, tiers=replace(kv.tiers, pause_policy=pause_policy)),
    )
    traffic = Traffic(
        input_lengths=Lengths.parse("", "p50=14,p95=24"),
        output_lengths=Lengths.parse("", "p50=8,p95=22"),
        requests_per_second=6.0,
        shared_prefix=9,
        num_groups=12,
    )
    trace = traffic.trace(150, seed=3, max_seq_len=48)
    speeds = TierSpeeds(
        kv_bytes_per_token=KV_BYTES, host=Bandwidth.both(1e6), disk=Bandwidth.both(1e6)
    )

    def once() -> Outcome:
        simulation = Simulation(config, COST, num_blocks=POOL_BLOCKS, tier_speeds=speeds)
        return replace(simulation.run(OpenArrivals(trace)), wall_seconds=0.0)

    outcome = once()
    assert outcome.num_completed == 150 and outcome.num_pauses > 0
    assert sum(outcome.num_onboarded_tokens.values()) > 0
    assert outcome == once()


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    config = ExecutorConfig(
        max_seq_len=48, kv_cache_config=KvCacheConfig(tiers=KvTiersConfig(host_memory_bytes=10))
    )
    speeds = TierSpeeds(
        kv_bytes_per_token=KV_BYTES, host=Bandwidth.both(1e9), disk=Bandwidth.both(1e9)
    )
    with pytest.raises(ConfigError, match="kv_cache_host_memory_bytes"):
        Simulation(config, COST, num_blocks=4, tier_speeds=speeds)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_means_nothing_is_refused(tier: str, speed: float) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-{tier}-bandwidth"):
        speeds = {"host": Bandwidth.both(1.0), "disk": Bandwidth.both(1.0)}
        TierSpeeds(kv_bytes_per_token=1, **speeds | {tier: Bandwidth.both(speed)})


def test_policies_are_compared_with_tiers_and_without() -> None:
    speeds = TierSpeeds(
        kv_bytes_per_token=KV_BYTES, host=Bandwidth.both(1e9), disk=Bandwidth.both(1e9)
    )
    outcomes = compare_policies(
        in_turn(2), make_config(host_blocks=100), COST, num_blocks=POOL_BLOCKS, tier_speeds=speeds
    )
    assert [bool(outcome.tiers) for outcome in outcomes] == [False, True, False, True]
    facts = comparison_json(outcomes)
    assert list(facts["policies"]) == list(facts["without_tiers"])
    (host,) = facts["policies"]["max_utilization"]["tiers"]
    assert host["tier"] == "host" and host["offloaded_bytes"] > 0
    assert facts["without_tiers"]["max_utilization"]["tiers"] == ()
    lines = "\n".join(comparison_lines(outcomes))
    assert "tokens back from host memory" in lines


def test_the_writer_writes_in_its_time_and_drops_what_finds_no_room() -> None:
    clock, disk = SimulatedClock(), SimulatedDisk(WRITE_QUEUE_BYTES, time.monotonic)
    writer = SimulatedWriter(disk, BLOCK_BYTES / 2.0, clock)  # two seconds a block
    blocks = [tier_block(number) for number in range(3)]
    assert all(writer.offer(block) for block in blocks)
    assert writer.offer(blocks[0]), "it waits already"
    clock.now = 4.5
    assert writer.find(blocks[1].key) is None and disk.contains(blocks[1].key)
    assert writer.find(blocks[2].key) is not None and not disk.contains(blocks[2].key)
    assert not writer.wait_until_written(1.0) and writer.wait_until_written(1.6)
    assert disk.written_bytes == 3 * BLOCK_BYTES


def test_the_writer_drops_what_finds_no_room() -> None:
    clock, disk = SimulatedClock(), SimulatedDisk(10 * WRITE_QUEUE_BYTES, time.monotonic)
    writer = SimulatedWriter(disk, WRITE_QUEUE_BYTES / 1.0, clock)
    large = np.broadcast_to(np.uint8(0), WRITE_QUEUE_BYTES)
    assert writer.offer(tier_block(1)._replace(content=large))
    assert not writer.offer(tier_block(2))
    clock.now = 1.0
    assert writer.offer(tier_block(2))


def test_the_reader_reads_one_load_after_the_other_and_passes_over_cancelled_ones() -> None:
    clock, disk = SimulatedClock(), SimulatedDisk(10 * BLOCK_BYTES, time.monotonic)
    blocks = [tier_block(number) for number in range(4)]
    for block in blocks[:3]:
        disk.put(block)
    reader = SimulatedReader(disk, 1.0, clock)
    first = reader.start([block.key for block in blocks[:2]], 0.0)
    unwanted = reader.start([blocks[0].key], 0.0)
    second = reader.start([blocks[2].key, blocks[3].key], 0.0)
    reader.wait([first], 0.5)
    assert clock.now == 0.5 and not first.is_done
    unwanted.is_cancelled = True
    reader.wait([first], 10.0)
    assert clock.now == 2.0 and first.is_done and len(first.blocks) == 2
    reader.wait([second], 10.0)
    assert clock.now == 4.0 and second.is_done
    assert len(second.blocks) == 1, "up to the first miss"
