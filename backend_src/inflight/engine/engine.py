"""Engine: the loop with all that it conducts, ready to be stepped; the executor adds a thread."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from inflight.api.executor_config import ExecutorConfig
from inflight.api.request import Request
from inflight.api.stats import KvCacheStats
from inflight.batch.llm_request import LlmRequest
from inflight.engine.admission import EngineLimits, check_request
from inflight.engine.inbox import Inbox
from inflight.engine.lane import ForwardLane, InlineLane
from inflight.engine.loop import IterationLoop
from inflight.engine.memory import kv_memory, sizing_line
from inflight.engine.onboarder import Onboarder
from inflight.engine.outbox import Outbox
from inflight.engine.parts import EngineParts
from inflight.engine.pools import kv_pools, layer_groups
from inflight.engine.record import RequestRecord
from inflight.engine.responder import Responder
from inflight.engine.statistics import StatsRecorder
from inflight.engine.tiers import make_reporter, make_tiers
from inflight.errors import QueueFullError, ShuttingDownError
from inflight.kv_cache import NO_OBSERVERS, CacheObservers, KvCacheManager, make_kv_cache
from inflight.model.packing import Packer
from inflight.model.runner import ModelRunner
from inflight.sampling.kernels import SamplingKernels
from inflight.sampling.sampler import Sampler
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.waiting_queue import rank_of
from inflight.text.stream import TextStream
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """``enqueue`` and ``cancel`` are safe from any thread; the loop is stepped by one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        config: ExecutorConfig,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        lane: ForwardLane | None = None,
        sampling_kernels: SamplingKernels | None = None,
        model_identity: str | None = None,
        observers: CacheObservers = NO_OBSERVERS,
    ) -> None:
        """``runner`` is loaded and has no KV cache yet; ``lane`` carries its forwards (None: no
        other thread does); ``sampling_kernels`` None: numpy's; ``model_identity``: equal for equal
        weights in equal precision, so that KV on disk can be used again (None: by no other
        process); ``observers`` hear of the KV cache. Raises ConfigError where a limit of ``config``
        cannot be held."""
        self.config = config
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._clock = clock
        self._ids = itertools.count(1)
        memory = kv_memory(config, runner.spec)
        pools, bound = kv_pools(config, layer_groups(runner.spec, config), memory)
        runner.allocate_kv_cache(
            pools[0].num_blocks, config.kv_cache_config.tokens_per_block, pools[1:]
        )
        self._limits = EngineLimits.of(config, vocab_size=runner.spec.vocab_size, pools=pools)
        self.inbox, self.outbox = Inbox(), Outbox()
        self.stats = StatsRecorder(config, runner.memory_usage)
        tiers = make_tiers(runner, config, model_identity=model_identity, clock=clock)
        reporter = make_reporter(tiers, observers)
        self.kv = make_kv_cache(
            pools,
            config.kv_cache_config,
            clock=clock,
            # Who moves blocks down comes first: a block is told below before it is gone above.
            observers=[o for o in (tiers, reporter, *observers.primary) if o is not None],
        )
        self.onboarder: Onboarder | None = None
        if tiers is not None:
            assert isinstance(self.kv, KvCacheManager), "with tiers all layers share a pool"
            self.onboarder = Onboarder(tiers, self.kv, config, reporter)
        self.loop = IterationLoop(
            self._make_parts(runner, lane or InlineLane(), sampling_kernels), clock
        )
        logger.info(sizing_line(config, runner.spec, pools, bound))

    @property
    def num_active_requests(self) -> int:
        """Requests in the engine, started or queued."""
        return len(self.loop.book) + self.inbox.num_new

    def kv_cache_stats(self) -> KvCacheStats:
        """Of the primary pool and the tiers; safe from any thread."""
        return self.loop.parts.kv_cache_stats()

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError or UnsupportedRequestError where a limit of this engine is
        exceeded, QueueFullError where too many wait; changes nothing."""
        check_request(request, self._limits)
        self._check_queue()

    def next_id(self) -> int:
        return next(self._ids)

    def enqueue(self, request_id: int, request: Request) -> None:
        """Into the inbox; the next step takes it. Raises ShuttingDownError when that is closed."""
        if not self.inbox.put(self._make_record(request_id, request)):
            raise ShuttingDownError("the server is shutting down")

    def close(self, *, is_sound: bool = True) -> None:
        """Ends what runs beside the loop, once that is not stepped any more.

        With ``kv_cache_disk_persist`` the KV in memory is written to the disk, for a few seconds;
        ``is_sound`` False: the books may be wrong, so not what the primary pool holds.
        """
        if self.onboarder is not None:
            self.onboarder.close(is_sound=is_sound)

    def _make_record(self, request_id: int, request: Request) -> RequestRecord:
        now = self._clock()
        seed = request.sampling_config.seed
        aging = self.config.scheduler_config.priority_aging_seconds
        llm = LlmRequest(
            request_id,
            request,
            arrival_time=now,
            rank=rank_of(now, request.priority, aging),
            end_ids=self._end_ids if request.end_ids is None else request.end_ids,
            seed=secrets.randbits(64) if seed is None else seed,
        )
        stream = TextStream(
            self._tokenizer,
            request.input_token_ids,
            stop_words=request.stop_words,
            stop_token_sequences=request.stop_token_sequences,
            echo_prompt=not request.output_config.exclude_input_from_output,
        )
        return RequestRecord(llm, stream)

    def _check_queue(self) -> None:
        """The limit counts requests that must wait, not those that the next step can start."""
        limit = self.config.max_queue_size
        if not limit:
            return
        waiting, started = len(self.loop.book.waiting), len(self.loop.book.started)
        can_start = max(0, self.config.max_batch_size - started - waiting)
        queued = waiting + max(0, self.inbox.num_new - can_start)
        if queued >= limit:
            raise QueueFullError(
                f"max_queue_size: {queued} requests are waiting and the limit is {limit}; "
                "try again later"
            )

    def _make_parts(
        self, runner: ModelRunner, lane: ForwardLane, kernels: SamplingKernels | None
    ) -> EngineParts:
        config, tokens_per_block = self.config, self.config.kv_cache_config.tokens_per_block
        return EngineParts(
            scheduler=Scheduler(
                config.scheduler_config,
                max_batch_size=config.max_batch_size,
                max_num_tokens=config.max_num_tokens,
                enable_chunked_context=config.enable_chunked_context,
            ),
            kv=self.kv,
            packer=Packer(
                max_num_tokens=config.max_num_tokens,
                max_batch_size=config.max_batch_size,
                max_blocks_per_sequence=-(-config.max_seq_len // tokens_per_block),
                tokens_per_block=tokens_per_block,
                num_pools=len(self.kv.pools),
            ),
            runner=runner,
            sampler=Sampler(
                vocab_size=runner.spec.vocab_size,
                normalize_log_probs=config.normalize_log_probs,
                kernels=kernels,
                device_room=runner.spec.sampling_room,
            ),
            lane=lane,
            inbox=self.inbox,
            responder=Responder(self.outbox),
            stats=self.stats,
            onboarder=self.onboarder,
        )
