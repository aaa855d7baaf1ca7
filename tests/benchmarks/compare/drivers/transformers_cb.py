"""transformers' own continuous batching, with its paged attention, in this process."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Workload

TOKENS_PER_BLOCK = 32
BATCH_TOKENS = 512
PAD_ID, NO_END_ID = 2, -1
SILENCE_SECONDS = 120


class System:
    def __init__(self, options: LoadOptions) -> None:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.weights]
        self._torch, self._transformers, self._reuse = torch, transformers, options.reuse
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.checkpoint, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.version = f"transformers {transformers.__version__} torch {torch.__version__}"
        self.settings = {
            "attn_implementation": "sdpa",
            "page_size": TOKENS_PER_BLOCK,
            "max_batch_tokens": BATCH_TOKENS,
            "allow_block_sharing": options.reuse,
            "threads": options.threads,
        }

    def serve(self, workload: Workload, door: str) -> Run:
        records = {job.job_id: Record(job.job_id) for job in workload.jobs}
        with self._torch.inference_mode():
            manager = self._started_manager(workload)
            began = time.perf_counter()
            for job in workload.jobs:
                manager.add_request(
                    list(job.prompt),
                    request_id=str(job.job_id),
                    max_new_tokens=job.max_tokens,
                    streaming=True,
                    eos_token_id=NO_END_ID,
                )
            running = set(records)
            while running:
                output = result_of(manager, len(running))
                record = records[int(output.request_id)]
                new = len(output.generated_tokens) - len(record.token_times)
                record.tokens_came(new, time.perf_counter() - began)
                if output.is_finished():
                    running.discard(record.job_id)
            seconds = time.perf_counter() - began
            manager.stop(block=True)
            manager.destroy()
        return Run(seconds, list(records.values()))

    def _started_manager(self, workload: Workload) -> Any:
        """Its thread runs and its cache is allocated: neither counts as serving."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        blocks_of_one = workload.longest_sequence // TOKENS_PER_BLOCK + 2
        manager = self._model.init_continuous_batching(
            generation_config=self._transformers.GenerationConfig(
                do_sample=False, eos_token_id=NO_END_ID, pad_token_id=PAD_ID
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=TOKENS_PER_BLOCK,
                num_blocks=workload.concurrency * blocks_of_one + 8,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=workload.concurrency,
                allow_block_sharing=self._reuse,
                use_cuda_graph=False,
                use_async_batching=False,
                auto_switch_to_flash=False,
            ),
        )
        manager.start()
        while manager.batch_processor is None:
            time.sleep(0.001)
        return manager

    def close(self) -> None:
        """The model lives in this process and ends with it."""


def result_of(manager: Any, num_running: int) -> Any:
    """The next output. Raises RuntimeError where the manager's thread has died or stands still."""
    output = manager.get_result(timeout=SILENCE_SECONDS)
    if output is None:
        print(manager.background_thread_status, file=sys.stderr)
        raise RuntimeError(f"no output for {SILENCE_SECONDS} s with {num_running} requests left")
    if output.error:
        raise RuntimeError(str(output.error))
    return output
