"""Executor: the engine behind a thread, with the verbs of TensorRT-LLM's Executor API."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inflight.api.config import InflightConfig, set_thread_defaults
from inflight.api.executor_config import ExecutorConfig
from inflight.api.request import Request, SamplingConfig
from inflight.api.response import Response
from inflight.api.stats import (
    IterationStats,
    KvCacheStats,
    KvEventStats,
    RequestStatsPerIteration,
)
from inflight.engine.engine import Engine
from inflight.errors import ConfigError, RequestError, RequestFailedError, ShuttingDownError
from inflight.executor.forward_thread import ForwardThread
from inflight.executor.idleness import rest
from inflight.executor.in_flight import InFlightClients
from inflight.executor.offline import GenerationOutput, gather, make_requests
from inflight.kv_cache import NO_OBSERVERS
from inflight.kv_events import make_publisher
from inflight.model.runner import ModelRunner
from inflight.sampling.kernels import SamplingKernels
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.kv_events.publisher import KvEventPublisher

logger = logging.getLogger(__name__)

SEQ_LEN_CEILING = 8192
"""max_seq_len where the configuration names none and the model allows more."""


class Executor:
    """Owns the engine thread and its forward thread. All methods are safe to call from any thread.

    Use it as a context manager, or call ``shutdown``: every accepted request gets exactly one final
    Response, also then.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: ExecutorConfig,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sampling_kernels: SamplingKernels | None = None,
        model_identity: str | None = None,
    ) -> None:
        """``runner`` is loaded and has no KV cache yet; ``end_ids`` are the checkpoint's;
        ``sampling_kernels`` None: numpy's; ``model_identity``: see Engine. Raises ConfigError where
        a limit of ``config`` cannot be held."""
        self.config = config
        self.tokenizer = tokenizer
        self._clients = InFlightClients()
        self._failure: BaseException | None = None
        self._forward_thread = ForwardThread()
        self._kv_events = _make_publisher(config)
        self._engine = Engine(
            runner,
            config,
            tokenizer=tokenizer,
            end_ids=end_ids,
            clock=clock,
            lane=self._forward_thread,
            sampling_kernels=sampling_kernels,
            model_identity=model_identity,
            observers=self._kv_events.observers() if self._kv_events else NO_OBSERVERS,
        )
        if self._kv_events is not None:
            try:
                self._kv_events.start()
            except ConfigError:
                self._engine.close()
                raise
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_checkpoint(cls, model_dir: str = "", config: InflightConfig | None = None) -> Executor:
        """Loads the checkpoint (empty: ``config.model_dir``, else the embedded model) and starts.

        Raises ConfigError or CheckpointError that names what is wrong.
        """
        set_thread_defaults()
        from inflight.checkpoint import prepare_checkpoint
        from inflight.model.factory import load_runner
        from inflight.model.sampling import load_sampling_kernels

        config = config or InflightConfig.load()
        checkpoint = prepare_checkpoint(
            model_dir or config.model_dir, config.cache_dir, progress=logger.info
        )
        longest = min(checkpoint.max_position_embeddings, SEQ_LEN_CEILING)
        config = config.model_copy(update={"max_seq_len": config.max_seq_len or longest})
        runner = load_runner(checkpoint.directory, config)
        return cls(
            runner,
            config.executor_config(max_seq_len=config.max_seq_len),
            tokenizer=Tokenizer.from_directory(checkpoint.directory),
            end_ids=checkpoint.end_ids,
            sampling_kernels=load_sampling_kernels(config.cache_dir),
            model_identity=_identity(checkpoint.directory, config, runner),
        )

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def is_healthy(self) -> bool:
        """False once an engine error has ended the executor."""
        return self._failure is None

    @property
    def num_active_requests(self) -> int:
        """Requests in the engine, started or queued."""
        return self._engine.num_active_requests

    def kv_cache_stats(self) -> KvCacheStats:
        return self._engine.kv_cache_stats()

    def kv_event_stats(self) -> KvEventStats | None:
        """None where the events of the KV cache are not published."""
        return None if self._kv_events is None else self._kv_events.stats()

    def can_enqueue_requests(self) -> bool:
        return self._failure is None and not self._engine.inbox.is_closed

    def enqueue_request(self, request: Request) -> int:
        """Takes the request into the queue and returns its id at once.

        Raises RequestError: InvalidRequestError or UnsupportedRequestError (beyond a limit of this
        engine), DuplicateRequestError (``client_id`` in flight), QueueFullError, ShuttingDownError,
        RequestFailedError (the engine has stopped on an error).
        """
        if self._failure is not None:
            raise RequestFailedError("the engine has stopped on an error")
        self._engine.check(request)
        request_id = self._engine.next_id()
        self._clients.add(request_id, request.client_id)
        try:
            self._engine.enqueue(request_id, request)
        except ShuttingDownError:
            self._clients.remove(request_id)
            raise
        return request_id

    def await_responses(
        self, request_id: int | None = None, timeout: float | None = None
    ) -> list[Response]:
        """Waits until there is something new of this request (None: of any) and takes it.

        One Response for each request; Results that nobody had taken are merged into it, so a slow
        reader never holds up the engine. A request that does not stream appears once, when it is
        final. Returns [] after ``timeout`` seconds (None: waits for ever).
        """
        responses = self._engine.outbox.take(request_id, timeout)
        for response in responses:
            if response.is_final:
                self._clients.remove(response.request_id)
        return responses

    def get_num_responses_ready(self) -> int:
        return self._engine.outbox.num_ready

    def cancel_request(self, request_id: int) -> None:
        """Ends the request as CANCELLED with what it has; unknown ids are ignored."""
        self._engine.inbox.cancel(request_id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Those recorded since the last call, oldest first, at most iter_stats_max_iterations."""
        return self._engine.stats.take_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """As ``get_latest_iteration_stats``; empty unless request_stats_max_iterations > 0."""
        return self._engine.stats.take_requests()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int,
        sampling_config: SamplingConfig | None = None,
        **request_fields: Any,
    ) -> list[GenerationOutput]:
        """Answers all prompts (text or token ids) together, in order, and waits for the last.

        ``request_fields`` are further fields of Request, the same for each prompt. Raises the
        RequestError of the first prompt that fails, after the others have ended. Not to be mixed
        with ``await_responses()`` of all requests on another thread, which would take its answers.
        """
        requests = make_requests(
            prompts,
            self.tokenizer,
            max_tokens=max_tokens,
            sampling_config=sampling_config or SamplingConfig(),
            **request_fields,
        )
        ids: list[int] = []
        try:
            for request in requests:
                ids.append(self.enqueue_request(request))
        except RequestError:
            for request_id in ids:
                self.cancel_request(request_id)
            gather(self, ids)
            raise
        return gather(self, ids)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Ends every request with a final Response and stops the thread; safe to call again.

        Responses that were not taken yet stay ready for ``await_responses``.
        """
        self._engine.inbox.close()
        self._thread.join(timeout)
        if self._kv_events is not None:
            self._kv_events.close()

    def _run(self) -> None:
        engine = self._engine
        try:
            with self._forward_thread:
                while not engine.inbox.is_closed:
                    if not engine.loop.has_work:
                        rest(engine.inbox, engine.kv)
                    engine.loop.step()
            engine.loop.end_everyone(lambda: ShuttingDownError("the server is shutting down"))
        except BaseException as error:  # the engine's radius: everybody hears of it
            logger.critical("the engine stopped: %s", type(error).__name__, exc_info=error)
            self._failure = error
            engine.inbox.close()
            engine.loop.fail_everyone(lambda: RequestFailedError("the engine stopped on an error"))
        finally:
            engine.close(is_sound=self._failure is None)


def _identity(directory: Path, config: InflightConfig, runner: ModelRunner) -> str | None:
    """What computes the KV: weights, their precision and the runner. None where KV is not kept:
    hashing large weights for the first time takes seconds."""
    if not config.kv_cache_disk_persist:
        return None
    from inflight.checkpoint.hashes import content_hash

    weights = content_hash(directory, config.cache_dir)
    return f"{weights} {config.dtype} {type(runner).__name__}"


def _make_publisher(config: ExecutorConfig) -> KvEventPublisher | None:
    events = config.kv_events_config
    if events is None:
        return None
    return make_publisher(events, config.kv_cache_config.tokens_per_block)
