"""vLLM's CPU backend in this process: requests are added, then the engine is stepped."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from tests.benchmarks.compare.driver import MAX_SEQ_LEN, LoadOptions
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Job, Workload

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
BATCH_TOKENS = 2048


class System:
    def __init__(self, options: LoadOptions) -> None:
        import torch
        import vllm

        self._vllm = vllm
        settings: dict[str, Any] = {
            "max_num_seqs": options.slots,
            "max_num_batched_tokens": BATCH_TOKENS,
            "enable_prefix_caching": options.reuse,
        }
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=options.checkpoint,
                dtype=DTYPES[options.weights],
                max_model_len=MAX_SEQ_LEN,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                **settings,
            )
        )
        self._num_runs = 0
        self.version = f"vllm {vllm.__version__} torch {torch.__version__}"
        self.settings = settings | {"threads": torch.get_num_threads()}

    def serve(self, workload: Workload, door: str) -> Run:
        self._num_runs += 1
        records = {job.job_id: Record(job.job_id) for job in workload.jobs}
        waiting, num_running = deque(workload.jobs), 0
        began = time.perf_counter()
        while waiting or num_running:
            while waiting and num_running < workload.concurrency:
                self._add(waiting.popleft())
                num_running += 1
            for output in self._engine.step():
                record = records[int(output.request_id.partition("-")[2])]
                new = len(output.outputs[0].token_ids)
                record.tokens_came(new, time.perf_counter() - began)
                num_running -= output.finished
        return Run(time.perf_counter() - began, list(records.values()))

    def _add(self, job: Job) -> None:
        self._engine.add_request(
            f"{self._num_runs}-{job.job_id}",
            {"prompt_token_ids": list(job.prompt)},
            self._vllm.SamplingParams(
                temperature=0.0,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            ),
        )

    def close(self) -> None:
        """The engine lives in this process and ends with it."""
