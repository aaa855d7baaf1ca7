"""A model computable by hand over a KV store that only holds tokens.

With ``windows`` it has a layer for each, and the next token is a function of what each layer sees.

The next token is a function of the whole history, which the runner reads back through the block
tables, slot by slot. One wrong block, one stale slot, one reuse of the wrong prefix, and every
token after it is different from ``expected_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight.api.kv_pools import KvPool, group_layers
from inflight.errors import ConfigError, ForwardError
from inflight.model.layer_groups import pool_of_layers
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)

VOCAB_SIZE = 997
POISON = -1
GARBAGE = -2


BYTES_PER_LAYER = 8
ALL_SEEN = (None,)
"""The windows of one layer that sees everything."""


def seen_part(window: int | None, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of the tokens of a history, those that the last one sees."""
    return ids if window is None else ids[max(0, len(ids) - window) :]


def next_token(history: Sequence[int], windows: Sequence[int | None] = ALL_SEEN) -> int:
    ids = np.asarray(history, dtype=np.int64)
    return _next_token([seen_part(window, ids) for window in windows], len(ids))


def _next_token(seen: Sequence[npt.NDArray[np.int64]], length: int) -> int:
    sums = [(ids * np.arange(length - len(ids) + 1, length + 1)).sum() for ids in seen]
    return (
        int(sum(int(each) * (31 + layer) for layer, each in enumerate(sums)) + length) % VOCAB_SIZE
    )


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    end_ids: Sequence[int] = (),
    windows: Sequence[int | None] = ALL_SEEN,
) -> list[int]:
    """What greedy generation gives for this prompt, without the end id."""
    history = list(prompt)
    for _ in range(max_tokens):
        token = next_token(history, windows)
        if token in end_ids:
            break
        history.append(token)
    return history[len(prompt) :]


class ArithmeticRunner:
    """A ModelRunner. ``before_forward`` may raise, block or look at the inputs."""

    def __init__(
        self,
        before_forward: Callable[[PackedInputs], None] | None = None,
        windows: Sequence[int | None] = ALL_SEEN,
    ) -> None:
        self.before_forward = before_forward
        self.windows = windows
        self.num_forwards = 0
        self.rows: list[int] = []
        self.num_blocks: list[int] = []
        """Of each pool."""
        self._stores: list[npt.NDArray[np.int64]] = []
        self._tokens_per_block = 0
        self._pool_of: list[int] = []

    @property
    def spec(self) -> ModelSpec:
        num_layers = len(self.windows)
        return ModelSpec(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=4096,
            num_layers=num_layers,
            kv_bytes_per_token=BYTES_PER_LAYER * num_layers,
            supported_tokens_per_block=(),
            dtype="fp32",
            device="cpu",
            layer_groups=group_layers(self.windows, [BYTES_PER_LAYER] * num_layers),
        )

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(device=7 << 30, pinned=3 << 20)

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        if self._tokens_per_block:
            raise ConfigError("the KV cache was allocated already")
        self._tokens_per_block = tokens_per_block
        self.num_blocks = [num_blocks, *(pool.num_blocks for pool in further_pools)]
        self._pool_of = pool_of_layers(len(self.windows), further_pools)
        # Layers of one pool hold the same tokens, so a store is enough for each pool.
        self._stores = [
            np.full(count * tokens_per_block, POISON, dtype=np.int64) for count in self.num_blocks
        ]

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        self.num_forwards += 1
        self.rows.append(len(inputs.token_ids))
        if self.before_forward is not None:
            self.before_forward(inputs)
        for pool, store in enumerate(self._stores):
            store[inputs.of_pool(pool).slot_mapping] = inputs.token_ids
        rows = []
        for row in inputs.logits_indices:
            sequence = int(np.searchsorted(inputs.cu_seqlens_q, row, side="right")) - 1
            rows.append(self._logits(inputs, sequence))
        shape = (len(rows), VOCAB_SIZE)
        logits = np.stack(rows) if rows else np.zeros(shape, dtype=np.float32)
        return ForwardOutput(logits=logits.astype(np.float32))

    def spoil(self, inputs: PackedInputs) -> None:
        """What a forward that failed leaves in the slots that it should have written."""
        for pool, store in enumerate(self._stores):
            store[inputs.of_pool(pool).slot_mapping] = GARBAGE

    def tokens_of(self, block_id: int) -> npt.NDArray[np.int64]:
        """int64[tokens_per_block], what lies in a block of the first pool."""
        start = block_id * self._tokens_per_block
        return self._stores[0][start : start + self._tokens_per_block]

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        blocks = self._stores[pool].reshape(-1, self._tokens_per_block)
        blocks[target_ids] = blocks[source_ids]

    kv_block_format = "tokens"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        blocks = self._stores[0].reshape(-1, self._tokens_per_block)
        return [blocks[block_id].copy().view(np.uint8) for block_id in block_ids]

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        blocks = self._stores[0].reshape(-1, self._tokens_per_block)
        blocks[block_ids] = np.stack(contents).view(np.int64)

    def _logits(self, inputs: PackedInputs, sequence: int) -> npt.NDArray[np.float32]:
        length = int(inputs.context_lens[sequence])
        seen = [
            self._read(inputs.of_pool(pool), pool, sequence, seen_part(window, np.arange(length)))
            for window, pool in zip(self.windows, self._pool_of, strict=True)
        ]
        logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
        logits[_next_token(seen, length)] = 10.0
        return logits

    def _read(
        self, inputs: PackedInputs, pool: int, sequence: int, positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        blocks = inputs.block_tables[sequence][positions // self._tokens_per_block]
        tokens: npt.NDArray[np.int64] = self._stores[pool][
            blocks * self._tokens_per_block + positions % self._tokens_per_block
        ]
        if (tokens == POISON).any():
            raise ForwardError("a slot was read that nobody wrote")
        return tokens
