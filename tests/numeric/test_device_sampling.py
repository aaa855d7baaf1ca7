"""Requests that sample, on the device runner: what its device chooses is what the host chooses, in
the whole engine, on a CPU that stands in for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.api import (
    ExecutorConfig,
    OutputConfig,
    Request,
    SamplingConfig,
)
from inflight.batch.device_sampling import SamplingRoom
from inflight.executor import Executor
from inflight.model.device.runner import DeviceRunner
from inflight.model.runner import ForwardOutput, ModelSpec, PackedInputs
from tests.fakes.tiny_models import tiny_checkpoint
from tests.numeric.test_device_executor import ENGINE, PROMPTS, runner_of

pytestmark = pytest.mark.numeric

NUM_TOKENS = 20
RULES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.4, "top_p": 0.9},
    {"top_k": 5},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.02, "temperature": 1.7},
    {"min_p": 0.3},
    {},
    {"repetition_penalty": 1.5},
    {"top_p": 0.95, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_tokens": 9},
)


class Watched:
    """A DeviceRunner, and what it was asked and answered."""

    def __init__(self, runner: DeviceRunner, room: SamplingRoom | None) -> None:
        self._runner = runner
        self._spec = replace(runner.spec, sampling_room=room)
        self.num_sampled = self.num_left = 0

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def forward(self, inputs: PackedInputs) -> ForwardOutput:
        output = self._runner.forward(inputs)
        if output.sampled is not None:
            self.num_sampled += len(inputs.logits_indices) - len(output.sampled.left)
            self.num_left += len(output.sampled.left)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def requests() -> Iterator[Request]:
    """Prompts times rules, a third of them with biases, bad words and log-probs."""
    for number, rules in enumerate((*RULES, *RULES)):
        prompt = PROMPTS[number % len(PROMPTS)]
        has_more = number % 3 == 0
        yield Request(
            input_token_ids=tuple(prompt),
            max_tokens=NUM_TOKENS,
            sampling_config=SamplingConfig(seed=number, **rules),
            output_config=OutputConfig(return_log_probs=number % 2 == 0),
            end_ids=(7, 19) if "min_tokens" in rules else (),
            bad_words=((prompt[-1], 11), (23,), (40, 41)) if has_more else (),
            logit_bias={23: 50.0, 31: 1.5, 50: -2.0} if has_more else {},
        )


def answers(
    runner: Watched, config: ExecutorConfig, asked: Sequence[Request]
) -> list[tuple[list[int], list[float]]]:
    with Executor(runner, config) as executor:
        request_ids = executor.enqueue_requests(list(asked))
        found = []
        for request_id in request_ids:
            tokens: list[int] = []
            log_probs: list[float] = []
            for response in executor.await_responses(request_id, timeout=60):
                assert response.result is not None, response.error
                tokens += response.result.output_token_ids
                log_probs += response.result.log_probs
            found.append((tokens, log_probs))
    return found


def check_same(
    got: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]
) -> None:
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(got, want, strict=True):
        assert tokens == wanted_tokens and tokens
        np.testing.assert_allclose(log_probs, wanted_log_probs, atol=1e-4)


@pytest.mark.parametrize("keys", [{}, {"cuda_graph_mode": False}], ids=["graphs", "eager"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_device_chooses_what_the_host_chooses(
    keys: dict[str, Any], normalize: bool, tmp_path: Path
) -> None:
    directory = tiny_checkpoint(tmp_path)
    config = replace(ENGINE, normalize_log_probs=normalize)
    asked = list(requests())
    on_host = Watched(runner_of(directory, **keys), None)
    runner = runner_of(directory, **keys)
    on_device = Watched(runner, runner.spec.sampling_room)
    want = answers(on_host, config, asked)
    got = answers(on_device, config, asked)
    check_same(got, want)
    assert on_host.num_sampled == 0
    assert on_device.num_sampled > len(asked) * NUM_TOKENS / 2 and on_device.num_left == 0
