"""A plan made into the work of one forward: blocks for it, packed inputs, rows to sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.batch.plan import ScheduledBatch
from inflight.engine.lane import ForwardWork
from inflight.engine.parts import EngineParts
from inflight.kv_cache import BlockCopies, KvExtent
from inflight.model.runner import ModelRunner
from inflight.sampling.sampler import SampledTokens


def extents_of(plan: ScheduledBatch) -> list[KvExtent]:
    """What the KV cache hears of the plan."""
    return [
        KvExtent(chunk.request.request_id, chunk.start, chunk.request.token_ids[: chunk.end])
        for chunk in plan.chunks
    ]


def prepare_forward(
    parts: EngineParts, plan: ScheduledBatch, extents: Sequence[KvExtent]
) -> ForwardWork:
    """Takes the blocks, and fixes all that the lane needs: whatever ends or joins meanwhile does
    not disturb it. Raises what ``reserve`` and the packer raise."""
    copies = parts.kv.reserve(extents)
    rows = parts.sampler.rows([chunk.request for chunk in plan.chunks if chunk.samples])
    tables = [pool.block_table for pool in parts.kv.pools]
    inputs = parts.packer.pack(
        plan, tables[0], tables[1:], need_logits=rows.need_logits, sampling=rows.inputs
    )

    def compute(launched: Callable[[], None]) -> SampledTokens:
        _make_copies(parts.runner, copies)
        output = parts.runner.forward(inputs, launched)
        if output.sampled is not None:
            assert output.logits is not None
            return parts.sampler.complete(rows, output.sampled, output.logits)
        if output.logits is not None:
            return parts.sampler.sample(rows, output.logits)
        assert output.likeliest is not None
        return parts.sampler.take_likeliest(rows, output.likeliest)

    return compute


def _make_copies(runner: ModelRunner, copies: BlockCopies) -> None:
    for pool, of_pool in enumerate((copies, *copies.further)):
        if len(of_pool.target_ids) > 0:
            runner.copy_blocks(of_pool.source_ids, of_pool.target_ids, pool)
