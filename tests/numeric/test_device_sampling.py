"""Requests that sample, on the device runner: what its device chooses is what the host chooses, in
the whole engine, on a CPU that stands in for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    OutputConfig,
    Request,
    SamplingConfig,
    SchedulerConfig,
)
from inflight.batch.device_sampling import SamplingRoom
from inflight.executor import Executor
from inflight.model.device.runner import DeviceRunner
from inflight.model.runner import ForwardOutput, ModelSpec, PackedInputs, nothing_beside
from inflight.sampling import Sampler
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.device_driver import (
    NotedRuntime,
    context,
    generation,
    logits_of,
    tiny_runner,
)
from tests.numeric.test_device_executor import ENGINE, PROMPTS, runner_of
from tests.unit.sampling.reference import make_request

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
        """``room``: None: the host samples."""
        self._runner = runner
        self._spec = replace(runner.spec, sampling_room=room)
        self.num_sampled = self.num_left = 0

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        output = self._runner.forward(inputs, launched)
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
        request_ids = [executor.enqueue_request(request) for request in asked]
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


def test_tokens_stay_the_same_through_pauses(tmp_path: Path) -> None:
    """Requests that pause lose their slots to others, and are counted anew."""
    directory = tiny_checkpoint(tmp_path)
    crowded = replace(
        ENGINE,
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        kv_cache_config=KvCacheConfig(tokens_per_block=16, num_blocks=9),
    )
    asked = list(requests())
    runner = runner_of(directory)
    want = answers(Watched(runner_of(directory), None), ENGINE, asked)
    on_device = Watched(runner, runner.spec.sampling_room)
    check_same(answers(on_device, crowded, asked), want)
    assert on_device.num_sampled and on_device.num_left == 0


def test_rows_without_room_are_sampled_on_the_host_beside_the_others(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    asked = list(requests())
    want = answers(Watched(runner_of(directory), None), ENGINE, asked)
    runner = runner_of(directory)
    mixed = Watched(runner, SamplingRoom(num_slots=ENGINE.max_batch_size, num_listed=20))
    check_same(answers(mixed, ENGINE, asked), want)
    assert mixed.num_left > 0 and mixed.num_sampled > mixed.num_left


def sampled_inputs(inputs: PackedInputs, room: SamplingRoom) -> PackedInputs:
    """The same rows of requests that are drawn and have penalties."""
    sampler = Sampler(vocab_size=VOCAB_SIZE, normalize_log_probs=False, device_room=room)
    rows = [
        make_request(i, seed=i, temperature=1.0, presence_penalty=1.0)
        for i in range(len(inputs.logits_indices))
    ]
    for request in rows:
        sampler.add(request)
    return replace(inputs, sampling=sampler.rows(rows).inputs)


def test_the_host_waits_once_and_once_more_for_rows_that_are_left(tmp_path: Path) -> None:
    runtime = NotedRuntime()
    runner = tiny_runner(tmp_path, runtime)
    room = runner.spec.sampling_room
    assert room is not None
    runtime.num_waits, waits = 0, []
    for listed in (room.num_listed, 3):
        for inputs in (context(0, 1), generation(0, 1)):
            own = sampled_inputs(inputs, replace(room, num_listed=listed))
            output = runner.forward(own)
            assert output.sampled is not None and output.logits is not None
            assert output.sampled.left.tolist() == ([] if listed > 3 else [1])
            assert output.logits.shape == (len(output.sampled.left), VOCAB_SIZE)
            waits.append(runtime.num_waits)
    assert waits == [1, 2, 4, 6] and runtime.replayed == [2, 2]


def test_rows_that_are_left_come_back_raw(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    room = runner.spec.sampling_room
    assert room is not None
    for inputs in (context(0, 1), generation(0, 1)):
        raw = logits_of(runner, inputs)
        output = runner.forward(sampled_inputs(inputs, replace(room, num_listed=3)))
        assert output.logits is not None
        np.testing.assert_array_equal(output.logits, raw[1:])


def test_rows_that_are_not_finite_are_left(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.forward(context(0, 1))
    with torch.inference_mode():
        runner.decoder.weights.norm.weight[3] = float("nan")
    assert runner.spec.sampling_room is not None
    output = runner.forward(sampled_inputs(generation(0, 1), runner.spec.sampling_room))
    assert output.sampled is not None and output.sampled.left.tolist() == [0, 1]
    assert output.logits is not None and np.isnan(output.logits).all()
