"""What sampling takes where the logits are, beside the host's path: a part of kernel_speed.

The host's path is what the runner does for rows that are left to it: the logits are copied to the
host, whose sampler (numpy's kernels) chooses. Both give the same tokens, which is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.api import OutputConfig, Request, SamplingConfig
from inflight.batch import LlmRequest
from inflight.batch.device_sampling import SamplingRoom
from inflight.kernels.logit_edits import edit_logits
from inflight.kernels.sampling import sample
from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.load import make_runtime
from inflight.model.device.staged_sampling import sampling_size, stage_sampling
from inflight.sampling import Sampler
from tests.gpu.rows import Outcome, Row

TARGET = 10.0
"""Times the host's speed; nobody has measured it yet."""
NEAR_TIES = 0.02
"""Share of rows whose draw may fall on the border of two tokens."""

RULES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50, "temperature": 0.8},
    "top_p 0.95": {"top_p": 0.95, "temperature": 0.8},
    "penalties, top_p 0.95, log-probs": {"top_p": 0.95, "repetition_penalty": 1.2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSizes:
    batches: tuple[int, ...]
    vocab: int
    prompt: int


LLAMA_SAMPLING = SamplingSizes(batches=(1, 256), vocab=128256, prompt=500)
SMALL_SAMPLING = SamplingSizes(batches=(2,), vocab=700, prompt=5)


class Rows:
    """Requests with random logits, as the runner has them on the device."""

    def __init__(
        self, sizes: SamplingSizes, batch: int, rules: dict[str, Any], device: torch.device
    ) -> None:
        rng = np.random.default_rng(batch)
        self.raw = torch.randn(batch, sizes.vocab, device=device) * 2
        self.raw[:, :2000] += 8 * torch.rand_like(self.raw[:, :2000])
        room = SamplingRoom(num_slots=batch, num_listed=batch * (sizes.prompt + 1))
        self.sampler = Sampler(vocab_size=sizes.vocab, normalize_log_probs=False, device_room=room)
        requests = [
            _request(i, rng.integers(0, sizes.vocab, size=sizes.prompt).tolist(), rules)
            for i in range(batch)
        ]
        for request in requests:
            self.sampler.add(request)
        self.host_rows = self.sampler.rows(requests)
        self.counts = torch.zeros(batch, sizes.vocab, dtype=torch.int32, device=device)
        self.rows = self._staged(room)
        self.ids = torch.zeros(batch, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(batch, device=device)

    def _staged(self, room: SamplingRoom) -> SamplingRows:
        inputs = self.host_rows.inputs
        assert inputs is not None
        buffer = np.zeros(sampling_size(room), dtype=np.int32)
        sections = stage_sampling(buffer, 0, inputs)
        staged = torch.from_numpy(buffer).to(self.counts.device)
        tensors = {
            name: staged[section.start : section.stop].view(getattr(torch, section.dtype))
            for name, section in sections.items()
        }
        return SamplingRows(
            **tensors,
            counts=self.counts,
            has_penalties=inputs.has_penalties,
            normalize_log_probs=False,
        )

    def on_device(self) -> None:
        """Of raw logits: without the copy they would be edited again and again."""
        logits = self.raw.clone()
        edit_logits(logits, self.rows)
        sample(logits, self.rows, self.ids, self.log_probs)

    def on_host(self, logits: Tensor) -> list[int]:
        rows = self.host_rows._replace(inputs=None)
        token_ids: list[int] = self.sampler.sample(rows, logits.numpy()).token_ids.tolist()
        return token_ids


def _request(index: int, prompt: list[int], rules: dict[str, Any]) -> LlmRequest:
    request = Request(
        input_token_ids=tuple(prompt),
        max_tokens=64,
        sampling_config=SamplingConfig(**rules),
        output_config=OutputConfig(return_log_probs="repetition_penalty" in rules),
    )
    return LlmRequest(index, request, arrival_time=0, rank=0, end_ids=(), seed=index)


def sampling_rows(
    sizes: SamplingSizes,
    device: torch.device,
    seconds: Callable[[Callable[[], object], torch.device], float],
) -> Iterator[Row]:
    """``seconds``: of one run on the device."""
    runtime = make_runtime(device)
    for batch in sizes.batches:
        for words, rules in RULES.items():
            rows = Rows(sizes, batch, rules, device)
            on_device = seconds(rows.on_device, device)
            began = time.perf_counter()
            logits = runtime.to_host(rows.raw)
            copied = time.perf_counter()
            wanted = rows.on_host(logits)
            on_host = time.perf_counter() - began
            num_other = int((rows.ids.cpu() != torch.tensor(wanted)).sum())
            yield Row(
                what=f"sample {batch} x {sizes.vocab}, {words}",
                outcome=Outcome.OK if num_other <= NEAR_TIES * batch else Outcome.FAILED,
                value=on_host / on_device,
                unit="times the host's speed",
                target=TARGET if device.type == "cuda" and batch > 1 else None,
                note=f"{1e3 * on_device:.3f} ms; host {1e3 * on_host:.1f} ms, of which "
                f"{1e3 * (copied - began):.1f} ms copying; {num_other} other tokens",
            )
