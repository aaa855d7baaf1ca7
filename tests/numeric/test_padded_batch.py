"""The padded static batch of the benchmarks computes what transformers computes without padding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from inflight.api import Request
from tests.benchmarks.padded_batch import PAD_ID, PaddedBatch, left_padded
from tests.fakes.tiny_models import VOCAB_SIZE, save_tiny_checkpoint, tiny_config

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of what it generates would end an answer."""
    config = tiny_config("llama", eos_token_id=list(range(200)))
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-llama"), config)


def test_padding_goes_to_the_left_and_is_masked() -> None:
    tokens, mask = left_padded([(5, 6, 7), (9,)])
    assert tokens.tolist() == [[5, 6, 7], [PAD_ID, PAD_ID, 9]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_every_request_gets_its_own_answer_in_full(checkpoint: Path) -> None:
    draw = random.Random(0)
    requests = [
        Request(
            input_token_ids=tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))),
            max_tokens=draw.randint(1, 20),
            end_ids=(),
        )
        for _ in range(7)
    ]
    padded = PaddedBatch(checkpoint, torch.float32)
    batches = list(padded.serve(requests, 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    for request, answer in zip(requests, sum(batches, []), strict=True):
        alone = model.generate(
            torch.tensor([request.input_token_ids]),
            attention_mask=torch.ones(1, len(request.input_token_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=VOCAB_SIZE,  # nobody's: nothing ends early
            pad_token_id=PAD_ID,
        )
        assert answer == alone[0, len(request.input_token_ids) :].tolist()
