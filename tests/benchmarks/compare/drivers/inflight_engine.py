"""Inflight over its engine API: ids in, ids out, in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.driver import KV_TOKENS, MAX_SEQ_LEN, LoadOptions
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Workload


def engine_keys(options: LoadOptions) -> dict[str, Any]:
    """The configuration keys that the engine is loaded with, here and behind Triton."""
    return {
        "dtype": options.weights,
        "max_batch_size": options.slots,
        "max_seq_len": MAX_SEQ_LEN,
        "max_tokens_in_paged_kv_cache": KV_TOKENS,
        "enable_kv_cache_reuse": options.reuse,
        "num_threads": options.threads,
    }


class System:
    """Without a tokenizer, as the peers that are driven by token ids."""

    def __init__(self, options: LoadOptions) -> None:
        import inflight
        from inflight.api.config import InflightConfig, set_thread_defaults

        set_thread_defaults()
        from inflight.executor import Executor
        from inflight.model.factory import load_runner

        keys = engine_keys(options)
        config = InflightConfig.load(environment={}, parameters=_as_text(keys))
        runner = load_runner(Path(options.checkpoint), config)
        self._executor = Executor(runner, config.executor_config(max_seq_len=MAX_SEQ_LEN))
        self.version = f"inflight {inflight.__version__}"
        self.settings = keys | {"max_num_tokens": config.max_num_tokens}

    def serve(self, workload: Workload, door: str) -> Run:
        from inflight.api import Request

        requests = [
            Request(input_token_ids=j.prompt, max_tokens=j.max_tokens, streaming=True, end_ids=())
            for j in workload.jobs
        ]
        records = [Record(job.job_id) for job in workload.jobs]
        began = time.perf_counter()
        running = {
            self._executor.enqueue_request(request): record
            for request, record in zip(requests, records, strict=True)
        }
        while running:
            for response in self._executor.await_responses():
                if response.error is not None:
                    raise response.error
                assert response.result is not None
                record = running[response.request_id]
                new = len(response.result.output_token_ids)
                record.tokens_came(new, time.perf_counter() - began)
                if response.is_final:
                    del running[response.request_id]
        return Run(time.perf_counter() - began, records)

    def close(self) -> None:
        self._executor.shutdown()


def _as_text(keys: dict[str, Any]) -> dict[str, str]:
    return {key: str(value).lower() for key, value in keys.items()}
