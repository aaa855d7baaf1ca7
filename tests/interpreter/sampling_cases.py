"""Edits of logits and the choice of a token, against the host's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.batch import LlmRequest
from inflight.batch.device_sampling import SamplingInputs, SamplingRoom
from inflight.kernels.logit_edits import edit_logits
from inflight.kernels.sampling import sample
from inflight.kernels.sampling_rows import SamplingRows
from inflight.model.device.staged_sampling import sampling_size, stage_sampling
from inflight.sampling import Sampler
from tests.interpreter.case import Case, exact, excess, poisoned
from tests.unit.sampling.reference import generate, make_request

Settings = dict[str, Any]

DRAWN: tuple[Settings, ...] = (
    {"temperature": 1.0},
    {"temperature": 3.0, "log_probs": True},
    {"temperature": 1e-40},
    {"top_k": 7, "log_probs": True},
    {"top_k": 900, "temperature": 2.0},
    {"top_p": 0.8, "log_probs": True},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0, "log_probs": True},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.05, "temperature": 1.4, "log_probs": True},
    {"top_k": 2, "top_p": 0.99, "temperature": 1e6},
)
GREEDY: tuple[Settings, ...] = ({}, {"log_probs": True}, {"top_k": 1, "temperature": 5.0})
EDITED: tuple[Settings, ...] = (
    {"repetition_penalty": 1.4, "log_probs": True},
    {"top_p": 0.9, "presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"top_k": 3, "repetition_penalty": 0.6, "logit_bias": {2: 4.0, 0: -1e35, 3: 2.5}},
    {"temperature": 1.0, "bad_words": ((1, 2), (4,), (0,)), "log_probs": True},
    {"min_tokens": 3, "end_ids": (2, 0), "logit_bias": {0: 50.0}},
    {},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledShape:
    words: str
    vocab_size: int
    rules: tuple[Settings, ...]
    logits: str = "peaked"
    """Of each row: peaked; flat, all equal; coarse, whole numbers with -infinity among them."""
    normalizes: bool = False


SHAPES = (
    SampledShape(words="each rule", vocab_size=1201, rules=DRAWN),
    SampledShape(words="greedy", vocab_size=4099, rules=GREEDY, normalizes=True),
    SampledShape(words="ties", vocab_size=300, rules=DRAWN, logits="coarse", normalizes=True),
    SampledShape(words="all equal", vocab_size=1100, rules=DRAWN, logits="flat"),
    SampledShape(words="several tiles", vocab_size=9000, rules=(DRAWN[6], DRAWN[10], DRAWN[4])),
    SampledShape(words="edits", vocab_size=700, rules=EDITED),
    SampledShape(words="one id", vocab_size=1, rules=(*DRAWN, *GREEDY), normalizes=True),
    SampledShape(words="edits, ties", vocab_size=5, rules=EDITED, logits="coarse"),
)


FEW = 6
"""Ids of the vocabulary in which masks and rows that are left are looked at."""


def sampling_cases() -> Iterator[Case]:
    for shape in SHAPES:
        words = f"{len(shape.rules)} rows of {shape.vocab_size}, {shape.words}"
        yield _case("edit_logits + sample", words, shape.vocab_size, partial(_run, shape))
    yield _case("edit_logits", "masks that leave nothing", FEW, _run_masks)
    yield _case("edit_logits + sample", "rows that are left", FEW, _run_left)


def _case(kernel: str, words: str, vocab_size: int, run: Callable[[torch.device], float]) -> Case:
    sizes = {"vocabulary": vocab_size}
    return Case(kernel=kernel, dtype=torch.float32, shape=words, sizes=sizes, run=run)


def _run(shape: SampledShape, device: torch.device) -> float:
    """Two iterations of the same requests: what was counted in the first one counts in the
    second."""
    vocab_size, num_rows = shape.vocab_size, len(shape.rules)
    requests = [_request(i, rules, vocab_size) for i, rules in enumerate(shape.rules)]
    room = SamplingRoom(num_slots=num_rows, num_listed=300)
    sampler = Sampler(vocab_size=vocab_size, normalize_log_probs=shape.normalizes, device_room=room)
    for request in requests:
        sampler.add(request)
    counts = torch.full((num_rows, vocab_size), 77, dtype=torch.int32, device=device)
    errors = []
    for iteration in range(2):
        rows = sampler.rows(requests)
        assert rows.inputs is not None
        raw = _logits(shape, seed=iteration)
        ids, log_probs = _sampled(raw, rows.inputs, counts, room)
        want = sampler.sample(rows, raw.copy())
        errors.append(exact(ids, torch.from_numpy(want.token_ids)))
        errors.append(excess(log_probs, torch.from_numpy(want.log_probs), 3e-6))
        for request, token_id in zip(requests, want.token_ids.tolist(), strict=True):
            generate(request, token_id)
    return max(errors)


def _request(index: int, rules: Settings, vocab_size: int) -> LlmRequest:
    prompt = [(index + 3 * i) % vocab_size for i in range(4)] + [1 % vocab_size] * 2
    return make_request(index, prompt=prompt, seed=index, **rules)


def _logits(shape: SampledShape, seed: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    size = (len(shape.rules), shape.vocab_size)
    logits = rng.normal(size=size) * 2
    few = logits[:, : min(40, shape.vocab_size)]
    few += rng.exponential(3, size=few.shape)
    if shape.logits == "flat":
        logits[:] = -1.25
    if shape.logits == "coarse":
        logits = np.round(logits)
        logits[:, ::5] *= -1  # so there are both zeros, which are equal
        logits[:, 1::3] = -np.inf
    return logits.astype(np.float32)


def _sampled(
    raw: npt.NDArray[np.float32], inputs: SamplingInputs, counts: Tensor, room: SamplingRoom
) -> tuple[Tensor, Tensor]:
    """Rows that lie apart; between them is NaN."""
    num_rows, vocab_size = raw.shape
    logits = poisoned(num_rows, vocab_size + 3, dtype=torch.float32, device=counts.device)
    logits = logits[:, :vocab_size]
    logits.copy_(torch.from_numpy(raw))
    rows = _rows(inputs, counts, room)
    edit_logits(logits, rows)
    ids = torch.full((num_rows,), -9, dtype=torch.int32, device=counts.device)
    log_probs = poisoned(num_rows, dtype=torch.float32, device=counts.device)
    sample(logits, rows, ids, log_probs)
    return ids, log_probs


def _rows(inputs: SamplingInputs, counts: Tensor, room: SamplingRoom) -> SamplingRows:
    buffer = np.full(sampling_size(room), -7, dtype=np.int32)
    sections = stage_sampling(buffer, 0, inputs)
    on_device = torch.from_numpy(buffer).to(counts.device)
    tensors = {
        name: on_device[section.start : section.stop].view(getattr(torch, section.dtype))
        for name, section in sections.items()
    }
    return SamplingRows(
        **tensors,
        counts=counts,
        has_penalties=inputs.has_penalties,
        normalize_log_probs=inputs.normalize_log_probs,
    )


def _inputs(requests: list[LlmRequest], vocab_size: int, room: SamplingRoom) -> SamplingInputs:
    sampler = Sampler(vocab_size=vocab_size, normalize_log_probs=False, device_room=room)
    for request in requests:
        sampler.add(request)
    inputs = sampler.rows(requests).inputs
    assert inputs is not None
    return inputs


def _run_masks(device: torch.device) -> float:
    """All that is not -infinity is masked in the first row, all but one id in the second."""
    room = SamplingRoom(num_slots=2, num_listed=40)
    words = tuple((i,) for i in range(0, FEW, 2))
    requests = [make_request(i, bad_words=words) for i in range(2)]
    logits = torch.full((2, FEW), -torch.inf, device=device)
    logits[:, ::2] = torch.tensor([1.0, 5.0, 3.0])
    logits[1, 3] = -40.0
    want = logits.clone()
    want[1, ::2] = -torch.inf
    counts = torch.zeros(2, FEW, dtype=torch.int32, device=device)
    edit_logits(logits, _rows(_inputs(requests, FEW, room), counts, room))
    return exact(logits, want)


def _run_left(device: torch.device) -> float:
    """The first row keeps its raw logits and gets no answer; its ids are counted nevertheless."""
    room = SamplingRoom(num_slots=2, num_listed=40)
    rules: Settings = {
        "temperature": 1.0, "presence_penalty": 1.0, "bad_words": ((3,),), "logit_bias": {2: 1.0},
    }  # fmt: skip
    requests = [make_request(i, prompt=(1, 1, 4), **rules) for i in range(2)]
    logits = torch.zeros(2, FEW, device=device)
    counts = torch.full((2, FEW), 5, dtype=torch.int32, device=device)
    is_left = torch.tensor([1, 0], dtype=torch.int32, device=device)
    rows = _rows(_inputs(requests, FEW, room), counts, room).with_left(is_left)
    edit_logits(logits, rows)
    ids = torch.full((2,), -9, dtype=torch.int32, device=device)
    log_probs = poisoned(2, dtype=torch.float32, device=device)
    sample(logits, rows, ids, log_probs)
    edited = torch.tensor([[0.0] * FEW, [0.0, -1.0, 1.0, -torch.inf, -1.0, 0.0]])
    counted = torch.tensor([[0, 2, 0, 0, 1, 0]] * 2, dtype=torch.int32)
    is_answered = torch.tensor([False, True])
    return max(
        exact(logits, edited),
        exact(counts, counted),
        exact(ids >= 0, is_answered),
        exact(~log_probs.isnan(), is_answered),
    )
