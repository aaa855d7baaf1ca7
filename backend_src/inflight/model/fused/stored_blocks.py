"""StoredBlocks: which weights of a checkpoint run in the quantized blocks that it came with.

A checkpoint made from a GGUF file carries the file's blocks beside the dequantized weights
(``checkpoint/gguf_blocks.py``). With 4-bit weights wanted, blocks of q4_0, q4_1 and q8_0 run as
they are, so nothing is lost; with 8-bit weights those of q8_0 do. What was stored in more than
4 bits and no kernel runs as it is (q5, q6_k) becomes q8_0; all else is quantized as wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from inflight.model.fused.tensors import CheckpointTensors
from inflight.native.gguf_blocks import GgufBlocks, QuantizedKind, stack_rows
from inflight.native.packed import WeightKind

_RUN_AS_STORED: Mapping[WeightKind, Collection[QuantizedKind]] = {
    "q4_0": ["q4_0", "q4_1", "q8_0"],
    "q4_1": ["q4_0", "q4_1", "q8_0"],
    "q8_0": ["q8_0"],
}
"""By the kind that is wanted."""
_FINER_THAN_4_BITS = frozenset({"q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "q8_1", "q8_k"})


class StoredBlocks:
    def __init__(self, tensors: CheckpointTensors, kind: WeightKind) -> None:
        """``kind``: what is wanted of the linears."""
        self._tensors = tensors
        self._kind: WeightKind = kind
        self._run_as_stored = _RUN_AS_STORED.get(kind, ())

    def of(self, names: Sequence[str], n: int, k: int) -> GgufBlocks | None:
        """Blocks of the weights ``names`` under each other, W [n, k] in all; None: they do not run
        as they are stored. Raises CheckpointError when they have another size."""
        found = [self._runnable_kind(name) for name in names]
        kind = found[0] if found else None
        if kind is None or len(set(found)) > 1:
            return None
        blocks = stack_rows([self._tensors.blocks(f"{name}.weight", kind, k) for name in names])
        return blocks if (blocks.n, blocks.k) == (n, k) else None

    def kind_for(self, names: Sequence[str]) -> WeightKind:
        """What the weights ``names`` are quantized to where they do not run as they are stored."""
        stored = {self._tensors.stored_kind(f"{name}.weight") for name in names}
        is_4_bit = self._kind == "q4_0" or self._kind == "q4_1"
        return "q8_0" if is_4_bit and stored & _FINER_THAN_4_BITS else self._kind

    def _runnable_kind(self, name: str) -> QuantizedKind | None:
        weight = f"{name}.weight"
        if not self._tensors.has_blocks(weight):
            return None
        stored = self._tensors.stored_kind(weight)
        return next((kind for kind in self._run_as_stored if kind == stored), None)
