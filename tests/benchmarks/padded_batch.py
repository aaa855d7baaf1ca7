"""PaddedBatch: a static batch as transformers' ``generate`` computes it, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from inflight.api import Request

PAD_ID = 0
"""Masked, so that any id would do."""


class PaddedBatch:
    """Prompts are padded on the left to the longest of their batch, and all rows of a batch
    generate greedily until the longest answer of the batch is whole."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def serve(self, requests: Sequence[Request], batch_size: int) -> Iterator[list[list[int]]]:
        """The tokens that were asked for, a batch at a time in the order of the requests."""
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            answers = self._generate(batch).tolist()
            yield [
                answer[: request.max_tokens] for answer, request in zip(answers, batch, strict=True)
            ]

    def _generate(self, batch: Sequence[Request]) -> Tensor:
        """int64[rows, the most tokens that one of them asks for]."""
        longest = max(request.max_tokens for request in batch)
        tokens, mask = left_padded([request.input_token_ids for request in batch])
        with torch.inference_mode():
            rows: Tensor = self._model.generate(
                input_ids=tokens,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=longest,
                    eos_token_id=self._model.config.vocab_size,  # nobody's: nothing ends early
                    pad_token_id=PAD_ID,
                ),
            )
        answers = rows[:, tokens.shape[1] :]
        if answers.shape[1] != longest:
            raise RuntimeError(f"{answers.shape[1]} tokens came where {longest} were asked for")
        return answers


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of those that are no padding, both int64[rows, longest prompt]."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [[PAD_ID] * (longest - len(prompt)) for prompt in prompts]
    tokens = [pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * len(pad) + [1] * (longest - len(pad)) for pad in padding]
    return torch.tensor(tokens), torch.tensor(mask)
