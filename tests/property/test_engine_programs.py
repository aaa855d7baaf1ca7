"""Random programs of enqueue, cancel, time passing and failing forwards, stepped without a thread.

After each step the KV books must add up; at the end every request has exactly one final word, and
what it was sent is a prefix of (or all of) what the arithmetic model says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    KvTiersConfig,
    Request,
    SchedulerConfig,
)
from inflight.batch.llm_request import LlmRequest
from inflight.engine.engine import Engine
from inflight.errors import ForwardError, RequestFailedError
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens

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


@dataclass
class Asked:
    whole: list[int]
    """What it is sent, if it is left alone."""
    stops: bool
    received: list[int] = field(default_factory=list)
    finals: list[str] = field(default_factory=list)


class Machine:
    """The engine, a clock that only moves when told, and everything its clients have heard."""

    def __init__(
        self,
        policy: CapacitySchedulerPolicy,
        chunking: ContextChunkingPolicy,
        chunked: bool,
        host_blocks: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.now = 1000.0
        self.fail_next = False
        self.asked: dict[int, Asked] = {}
        self.seen: dict[int, LlmRequest] = {}
        """Whoever was in the engine at the end of a step."""
        self.num_recorded_pauses = 0
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
        self.windows = windows
        runner = ArithmeticRunner(self._before, windows)
        self.engine = Engine(runner, config, clock=lambda: self.now)

    def enqueue(
        self,
        family: int,
        length: int,
        max_tokens: int,
        priority: float,
        allotted: float | None,
        stop_at: int | None,
    ) -> None:
        prompt = [family * 100 + i for i in range(length)]
        tokens = expected_tokens(prompt, max_tokens, windows=self.windows)
        stops = stop_at is not None and stop_at < max_tokens
        stop = tokens[stop_at] if stops and stop_at is not None else None
        request_id = self.engine.next_id()
        whole = tokens if stop is None else tokens[: tokens.index(stop)]
        self.asked[request_id] = Asked(whole, stops)
        self.engine.enqueue(
            request_id,
            Request(
                input_token_ids=tuple(prompt),
                max_tokens=max_tokens,
                streaming=True,
                priority=priority,
                allotted_time_ms=None if allotted is None else allotted * 1000,
                stop_token_sequences=() if stop is None else ((stop,),),
            ),
        )

    def step(self) -> None:
        self.now += 0.01
        self.engine.loop.step()
        self.engine.kv.check_integrity()
        started = self.engine.loop.book.started
        assert len(started) <= 4
        assert [r.rank for r in started] == sorted(r.rank for r in started)
        self.seen |= {record.llm.request_id: record.llm for record in self.engine.loop.book}
        self.num_recorded_pauses += sum(
            each.inflight_batching_stats.num_paused_requests
            for each in self.engine.stats.take_iterations()
        )
        for response in self.engine.outbox.take(None, 0):
            asked = self.asked[response.request_id]
            if response.result is not None:
                asked.received += response.result.output_token_ids
            if response.is_final:
                reason = response.result.finish_reason.name if response.result else "ERROR"
                asked.finals.append(reason)

    def drain(self) -> None:
        for _ in range(3000):
            if self.engine.num_active_requests == 0:
                return
            self.step()
        raise AssertionError("requests are left that never end")

    def check_pauses(self) -> None:
        """All were recorded; the last ones with whatever is computed next."""
        self.fail_next = False
        self.enqueue(0, 1, 1, 0.5, None, None)
        self.drain()
        assert self.num_recorded_pauses == sum(llm.num_pauses for llm in self.seen.values())

    def check(self) -> None:
        for asked in self.asked.values():
            assert len(asked.finals) == 1, asked
            assert asked.received == asked.whole[: len(asked.received)]
            if asked.finals in (["LENGTH"], ["STOP_WORDS"]):
                assert asked.received == asked.whole
                assert asked.stops == (asked.finals == ["STOP_WORDS"])
        assert self.engine.kv.num_free_blocks == self.engine.kv.num_blocks

    def _before(self, inputs: object) -> None:
        if self.fail_next:
            self.fail_next = False
            raise ForwardError("asked to fail")


def run(machine: Machine, program: list[tuple[object, ...]]) -> None:
    for name, *arguments in program:
        if name == "enqueue":
            machine.enqueue(*arguments)  # type: ignore[arg-type]
        elif name == "crowd":
            count, max_tokens = arguments
            for i in range(count):  # type: ignore[call-overload]
                machine.enqueue(i, 3 + i, max_tokens, 0.5, None, None)  # type: ignore[arg-type]
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
    machine = Machine(policy, chunking, chunked, host_blocks, windows)
    run(machine, program)
    machine.drain()
    machine.check_pauses()
    machine.check()


def test_a_plan_that_only_pauses_and_one_that_fails_are_counted() -> None:
    machine = Machine(
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
    machine = Machine(
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        chunked=True,
    )
    for family in range(4):
        machine.enqueue(family, 9, 20, 0.5, None, None)
    for _ in range(5):
        machine.step()
    machine.enqueue(0, 5, 5, 0.5, None, None)
    machine.engine.inbox.close()
    machine.engine.loop.end_everyone(lambda: RequestFailedError("over"))
    answers = machine.engine.outbox.take(None, 0)
    assert sorted(a.request_id for a in answers if a.has_error) == sorted(machine.asked)
    machine.engine.kv.check_integrity()
    assert machine.engine.kv.num_free_blocks == NUM_BLOCKS
    assert FinishReason.CANCELLED.text == "cancelled"
