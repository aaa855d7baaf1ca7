"""The embedded model run by transformers alone, in fp32: the oracle of the server tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from inflight.checkpoint import Checkpoint, prepare_checkpoint

SAFE_MARGIN = 1e-4
"""A top-2 margin below this ends a comparison: equal tokens are promised for equal logits."""


class Reference:
    """Greedy continuations, as text."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint = prepare_checkpoint("", "", progress=lambda line: None)
        self._model, self._tokenizer = _load(self.checkpoint.directory)

    def greedy(self, prompt: str, max_tokens: int) -> str:
        """What follows ``prompt``; cut before the end id and before the first near-tie."""
        return str(self._tokenizer.decode(self.greedy_ids(prompt, max_tokens)))

    @lru_cache(maxsize=256)  # noqa: B019 (one Reference lives as long as the test session)
    def greedy_ids(self, prompt: str, max_tokens: int) -> tuple[int, ...]:
        ids = torch.tensor([self._tokenizer(prompt)["input_ids"]])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
        generated: list[int] = []
        for token, scores in zip(output.sequences[0, ids.shape[1] :], output.scores, strict=True):
            best = scores[0].topk(2).values
            is_near_tie = float(best[0] - best[1]) < SAFE_MARGIN
            if is_near_tie or int(token) in self.checkpoint.end_ids:
                break
            generated.append(int(token))
        return tuple(generated)

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def count(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])


def _load(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(directory)
