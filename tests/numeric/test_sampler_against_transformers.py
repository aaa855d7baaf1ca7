"""The sampler's rules against transformers' logits processors, an implementation not ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.sampling import Sampler
from tests.unit.sampling.reference import make_request

pytestmark = pytest.mark.numeric

VOCABULARY = 3001
PROMPT = (4, 8, 15, 16, 23, 42, 8)
BAD_WORDS = ((42, 8, 11), (8, 12), (13,))

CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    ({"top_k": 20}, [TopKLogitsWarper(20)]),
    ({"top_p": 0.85}, [TopPLogitsWarper(0.85)]),
    ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    (
        {"repetition_penalty": 1.5, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.9),
        ],
    ),
    (
        {"bad_words": BAD_WORDS, "temperature": 1.0},
        [NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])],
    ),
]


@pytest.mark.parametrize(("settings", "processors"), CASES, ids=lambda value: str(value)[:60])
def test_same_survivors_and_probabilities(settings: dict[str, Any], processors: list[Any]) -> None:
    seeds = 300
    generator = np.random.default_rng(2)
    row = generator.normal(scale=2.5, size=VOCABULARY).astype(np.float32)
    row[list(PROMPT)] = 6.0
    row[[11, 12, 13]] = 9.0
    theirs = LogitsProcessorList(processors)(
        torch.tensor([PROMPT]), torch.from_numpy(row.copy())[None]
    )
    probabilities = torch.softmax(theirs[0].double(), dim=-1)

    requests = [
        make_request(seed, seed=seed, prompt=PROMPT, log_probs=True, **settings)
        for seed in range(seeds)
    ]
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=True)
    for request in requests:
        sampler.add(request)
    sampled = sampler.sample(sampler.rows(requests), np.tile(row, (seeds, 1)))
    np.testing.assert_allclose(
        np.exp(sampled.log_probs), probabilities[sampled.token_ids.tolist()], rtol=1e-4
    )
