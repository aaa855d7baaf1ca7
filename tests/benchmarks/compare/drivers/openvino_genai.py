"""OpenVINO GenAI's continuous batching pipeline in this process."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.records import Record, Run
from tests.benchmarks.compare.workloads import Job, Workload

BATCH_TOKENS = 512
CACHE_GIB = 2


class System:
    """``options.files``: the folder of the exported model. Exported fp32 weights are computed in
    bf16 where ``options.weights`` says so."""

    def __init__(self, options: LoadOptions) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.max_num_seqs = options.slots
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = options.reuse
        scheduler.cache_size = CACHE_GIB
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.weights == "fp32":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.files, scheduler, "CPU", properties
        )
        self._next_id = 0
        self.version = f"openvino {openvino.__version__} genai {openvino_genai.__version__}"
        self.settings = properties | {
            "max_num_batched_tokens": BATCH_TOKENS,
            "max_num_seqs": options.slots,
            "enable_prefix_caching": options.reuse,
            "export": options.files.rpartition("/")[2],
        }

    def serve(self, workload: Workload, door: str) -> Run:
        waiting = deque(workload.jobs)
        records: list[Record] = []
        running: list[tuple[Any, Record]] = []
        began = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < workload.concurrency:
                job = waiting.popleft()
                records.append(Record(job.job_id))
                running.append((self._add(job), records[-1]))
            self._pipeline.step()
            now = time.perf_counter() - began
            running = [pair for pair in running if not self._read(*pair, now)]
        return Run(time.perf_counter() - began, records)

    def _add(self, job: Job) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        prompt = self._openvino.Tensor(self._numpy.array([job.prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._next_id, prompt, config)

    def _read(self, handle: Any, record: Record, now: float) -> bool:
        """Takes what is new; True when the request has ended."""
        while handle.can_read():
            for output in handle.read().values():
                record.tokens_came(len(output.generated_ids), now)
        return bool(handle.get_status() != self._genai.GenerationStatus.RUNNING)

    def close(self) -> None:
        """The pipeline lives in this process and ends with it."""
