"""Machine: an engine that is stepped without a thread, and everything its clients have heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.api import ExecutorConfig, KvCacheRetentionConfig, Request
from inflight.batch.llm_request import LlmRequest
from inflight.engine.engine import Engine
from inflight.errors import ForwardError
from inflight.model.runner import PackedInputs
from tests.fakes.arithmetic_runner import ArithmeticRunner, expected_tokens


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
        config: ExecutorConfig,
        *,
        windows: tuple[int | None, ...] = (None,),
        model_identity: str | None = None,
    ) -> None:
        self.now = 1000.0
        self.fail_next = False
        """The next forward leaves garbage where it should have written, and raises."""
        self.asked: dict[int, Asked] = {}
        self.seen: dict[int, LlmRequest] = {}
        """Whoever was in the engine at the end of a step."""
        self.num_recorded_pauses = 0
        self.windows = windows
        self.runner = ArithmeticRunner(self._before, windows)
        self.engine = Engine(
            self.runner, config, clock=lambda: self.now, model_identity=model_identity
        )

    def enqueue(
        self,
        family: int,
        length: int,
        max_tokens: int,
        priority: float = 0.5,
        allotted: float | None = None,
        stop_at: int | None = None,
        retention: KvCacheRetentionConfig | None = None,
    ) -> None:
        """``family``: of prompts that begin alike. ``allotted``: seconds. ``stop_at``: number of
        the answer's token that is a stop sequence."""
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
                kv_cache_retention_config=retention,
            ),
        )

    def step(self) -> None:
        self.now += 0.01
        self.engine.loop.step()
        self.engine.kv.check_integrity()
        started = self.engine.loop.book.started
        assert len(started) <= self.engine.config.max_batch_size
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
        self.enqueue(0, 1, 1)
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

    def _before(self, inputs: PackedInputs) -> None:
        if self.fail_next:
            self.fail_next = False
            self.runner.spoil(inputs)
            raise ForwardError("asked to fail")
