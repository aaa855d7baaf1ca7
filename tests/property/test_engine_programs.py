"""Random programs of enqueue, cancel, time passing and failing forwards, stepped without a thread.

After each step the KV books must add up; at the end every request has exactly one final word, and
what it was sent is a prefix of (or all of) what the arithmetic model says.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    KvTiersConfig,
    SchedulerConfig,
)
from inflight.errors import RequestFailedError
from tests.fakes.arithmetic_runner import ArithmeticRunner
from tests.fakes.engine_machine import Machine

NUM_BLOCKS, TOKENS_PER_BLOCK = 36, 4
BLOCK_BYTES = TOKENS_PER_BLOCK * ArithmeticRunner().spec.kv_bytes_per_token

operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("enqueue"),
            st.integers(0, 3),  # which family of prompts: a common prefix each
            st.integers(1, 20),  # prompt length
            st.integers(1, 20),  # max_tokens
            st.sampled_from([0.0, 0.3, 0.5, 1.0]),  # priority
            st.sampled_from([None, None, 2.0]),  # seconds allotted
            st.sampled_from([None, None, 0, 3, 7]),  # which token is a stop sequence
        ),
        # Requests that outgrow what MAX_UTILIZATION looks ahead: how many, and their max_tokens.
        st.tuples(st.just("crowd"), st.integers(2, 6), st.integers(40, 60)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0.0, 1.5)),
        st.tuples(st.just("fail")),
    ),
    max_size=40,
)


def make_machine(
    policy: CapacitySchedulerPolicy,
    chunking: ContextChunkingPolicy,
    chunked: bool,
    host_blocks: int = 0,
    windows: tuple[int | None, ...] = (None,),
) -> Machine:
    config = ExecutorConfig(
        max_batch_size=4,
        max_num_tokens=12 if chunked else 80,
        max_seq_len=80,
        enable_chunked_context=chunked,
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=policy, context_chunking_policy=chunking
        ),
        kv_cache_config=KvCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=NUM_BLOCKS,
            tiers=KvTiersConfig(host_memory_bytes=host_blocks * BLOCK_BYTES),
        ),
    )
    return Machine(config, windows=windows)


def run(machine: Machine, program: list[tuple[object, ...]]) -> None:
    for name, *arguments in program:
        if name == "enqueue":
            machine.enqueue(*arguments)  # type: ignore[arg-type]
        elif name == "crowd":
            count, max_tokens = arguments
            for i in range(count):  # type: ignore[call-overload]
                machine.enqueue(i, 3 + i, max_tokens)  # type: ignore[arg-type]
        elif name == "step":
            for _ in range(arguments[0]):  # type: ignore[call-overload]
                machine.step()
        elif name == "cancel":
            machine.engine.inbox.cancel(arguments[0])  # type: ignore[arg-type]
        elif name == "wait":
            machine.now += arguments[0]  # type: ignore[operator]
        else:
            machine.fail_next = True


@settings(max_examples=150, deadline=None)
@given(
    program=operations,
    policy=st.sampled_from(list(CapacitySchedulerPolicy)),
    chunking=st.sampled_from(list(ContextChunkingPolicy)),
    chunked=st.booleans(),
    # The clock stands still within a step, so nothing tells that computing is faster: all that is
    # found in the tier comes back.
    host_blocks=st.sampled_from([0, 3, 100]),
    windows=st.sampled_from([(None,), (None,), (6,), (None, 6), (9, 2)]),
)
def test_programs(
    program: list[tuple[object, ...]],
    policy: CapacitySchedulerPolicy,
    chunking: ContextChunkingPolicy,
    chunked: bool,
    host_blocks: int,
    windows: tuple[int | None, ...],
) -> None:
    machine = make_machine(policy, chunking, chunked, host_blocks, windows)
    run(machine, program)
    machine.drain()
    machine.check_pauses()
    machine.check()


def test_a_plan_that_only_pauses_and_one_that_fails_are_counted() -> None:
    machine = make_machine(
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        chunked=True,
    )
    outgrown = ("crowd", 6, 60)
    run(machine, [outgrown, ("step", 12), ("enqueue", 1, 20, 20, 1.0, None, None), outgrown])
    for _ in range(60):
        run(machine, [("step", 3), ("fail",)])
    machine.drain()
    assert sum(llm.num_pauses for llm in machine.seen.values()) > 0
    machine.check_pauses()
    machine.check()


def test_shutdown_in_the_middle_answers_everyone() -> None:
    machine = make_machine(
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        chunked=True,
    )
    for family in range(4):
        machine.enqueue(family, 9, 20)
    for _ in range(5):
        machine.step()
    machine.enqueue(0, 5, 5)
    machine.engine.inbox.close()
    machine.engine.loop.end_everyone(lambda: RequestFailedError("over"))
    answers = machine.engine.outbox.take(None, 0)
    assert sorted(a.request_id for a in answers if a.has_error) == sorted(machine.asked)
    machine.engine.kv.check_integrity()
    assert machine.engine.kv.num_free_blocks == NUM_BLOCKS
    assert FinishReason.CANCELLED.text == "cancelled"
