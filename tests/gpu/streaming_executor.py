"""ExecutorDoor: the engine without a server, for machines on which none can run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from inflight import Executor, Request
from inflight.api.config import InflightConfig
from tests.gpu.streaming import Load, Stream


class ExecutorDoor:
    """Ids in, ids out, in this process; a context manager."""

    name = "Executor in process"

    def __init__(self, checkpoint: Path, keys: Mapping[str, int]) -> None:
        config = InflightConfig.model_validate(keys)
        self._executor = Executor.from_checkpoint(str(checkpoint), config)

    def serve(self, load: Load) -> list[Stream]:
        tokenizer = self._executor.tokenizer
        assert tokenizer is not None
        streams: dict[int, Stream] = {}
        began = time.perf_counter()
        for prompt in load.prompts():
            request = Request(
                input_token_ids=tuple(tokenizer.encode(prompt)),
                max_tokens=load.max_tokens,
                streaming=True,
                end_ids=(),
            )
            streams[self._executor.enqueue_request(request)] = Stream()
        waiting = set(streams)
        while waiting:
            for response in self._executor.await_responses():
                if response.error is not None:
                    raise response.error
                assert response.result is not None
                count = len(response.result.output_token_ids)
                streams[response.request_id].tokens_came(count, time.perf_counter() - began)
                if response.is_final:
                    waiting.discard(response.request_id)
        return list(streams.values())

    def __enter__(self) -> ExecutorDoor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._executor.shutdown()
