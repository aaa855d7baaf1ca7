"""A model computable by hand over a KV store that only holds tokens.

The next token is a function of the whole history, which the runner reads back through the block
tables, slot by slot. One wrong block, one stale slot, one reuse of the wrong prefix, and every
token after it is different from ``expected_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.errors import ConfigError, ForwardError
from inflight.model.runner import ForwardOutput, ModelSpec, PackedInputs

VOCAB_SIZE = 997
POISON = -1


def next_token(history: Sequence[int]) -> int:
    ids = np.asarray(history, dtype=np.int64)
    return int((ids * np.arange(1, len(ids) + 1)).sum() * 31 + len(ids)) % VOCAB_SIZE


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, end_ids: Sequence[int] = ()
) -> list[int]:
    """What greedy generation gives for this prompt, without the end id."""
    history = list(prompt)
    for _ in range(max_tokens):
        token = next_token(history)
        if token in end_ids:
            break
        history.append(token)
    return history[len(prompt) :]


class ArithmeticRunner:
    """A ModelRunner. ``before_forward`` may raise, block or look at the inputs."""

    def __init__(self, before_forward: Callable[[PackedInputs], None] | None = None) -> None:
        self.before_forward = before_forward
        self.num_forwards = 0
        self.rows: list[int] = []
        self._store = np.empty(0, dtype=np.int64)
        self._tokens_per_block = 0

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=4096,
            num_layers=1,
            kv_bytes_per_token=8,
            supported_tokens_per_block=(),
            dtype="fp32",
            device="cpu",
        )

    def allocate_kv_cache(self, num_blocks: int, tokens_per_block: int) -> None:
        if self._tokens_per_block:
            raise ConfigError("the KV cache was allocated already")
        self._tokens_per_block = tokens_per_block
        self._store = np.full(num_blocks * tokens_per_block, POISON, dtype=np.int64)

    def forward(self, inputs: PackedInputs) -> ForwardOutput:
        self.num_forwards += 1
        self.rows.append(len(inputs.token_ids))
        if self.before_forward is not None:
            self.before_forward(inputs)
        self._store[inputs.slot_mapping] = inputs.token_ids
        rows = []
        for row in inputs.logits_indices:
            sequence = int(np.searchsorted(inputs.cu_seqlens_q, row, side="right")) - 1
            rows.append(self._logits(inputs, sequence))
        shape = (len(rows), VOCAB_SIZE)
        logits = np.stack(rows) if rows else np.zeros(shape, dtype=np.float32)
        return ForwardOutput(logits=logits.astype(np.float32))

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32]
    ) -> None:
        blocks = self._store.reshape(-1, self._tokens_per_block)
        blocks[target_ids] = blocks[source_ids]

    kv_block_format = "tokens"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        blocks = self._store.reshape(-1, self._tokens_per_block)
        return blocks[block_ids].view(np.uint8)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: npt.NDArray[np.uint8]
    ) -> None:
        blocks = self._store.reshape(-1, self._tokens_per_block)
        blocks[block_ids] = contents.view(np.int64)

    def _logits(self, inputs: PackedInputs, sequence: int) -> npt.NDArray[np.float32]:
        length = int(inputs.context_lens[sequence])
        positions = np.arange(length)
        blocks = inputs.block_tables[sequence][positions // self._tokens_per_block]
        slots = blocks * self._tokens_per_block + positions % self._tokens_per_block
        history = self._store[slots]
        if (history == POISON).any():
            raise ForwardError("a slot was read that nobody wrote")
        logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
        logits[next_token(history.tolist())] = 10.0
        return logits
