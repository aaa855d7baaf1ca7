"""CheckpointTensors: the weights of a Hugging Face folder by name, mapped from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.checkpoint.files import GGUF_BLOCKS_FILE, INDEX_FILE, SINGLE_FILE, read_json
from inflight.errors import CheckpointError
from inflight.native.gguf_blocks import GgufBlocks, QuantizedKind


class CheckpointTensors:
    """Nothing is read before a tensor's numbers are used; on a GPU, before it is asked for."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        """``device``: where tensors lie; they go there from the mapped files, without a copy in
        between. Raises CheckpointError when there are no readable safetensors files."""
        self._directory = directory
        self._device = device
        if (directory / INDEX_FILE).is_file():
            names = self._files_of_index()
        elif (directory / SINGLE_FILE).is_file():
            names = [SINGLE_FILE]
        else:
            raise CheckpointError(f"model_dir: {directory} has no safetensors weights")
        self._file_of: dict[str, Any] = {}
        for name in names:
            file = self._open(name)
            self._file_of.update(dict.fromkeys(file.keys(), file))
        has_blocks = (directory / GGUF_BLOCKS_FILE).is_file()
        self._blocks = self._open(GGUF_BLOCKS_FILE) if has_blocks else None
        self._stored_kinds: dict[str, str] = (self._blocks and self._blocks.metadata()) or {}
        self._with_blocks = frozenset(self._blocks.keys() if self._blocks else ())

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor as it is stored. Raises CheckpointError when it is missing, of another shape
        or not of floats."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"model_dir: {self._directory}: the weights {name} are missing")
        tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"model_dir: {self._directory}: {name} is {tensor.dtype} of "
                f"{tuple(tensor.shape)}, and floats of {shape} are expected"
            )
        return tensor

    def stored_kind(self, name: str) -> str | None:
        """In which of GGUF's kinds (q4_1, q6_k, ...) the tensor was stored; None: in floats."""
        return self._stored_kinds.get(name)

    def has_blocks(self, name: str) -> bool:
        """Whether the blocks that it was stored in are there."""
        return name in self._with_blocks

    def blocks(self, name: str, kind: QuantizedKind, k: int) -> GgufBlocks:
        """Those of a tensor W [n, k] that has blocks of ``kind``. Raises CheckpointError."""
        stored = self._blocks.get_tensor(name).numpy() if self._blocks else np.empty(0, np.uint8)
        return GgufBlocks.from_bytes(stored, kind, len(stored), k)

    def _files_of_index(self) -> list[str]:
        weight_map = read_json(self._directory / INDEX_FILE).get("weight_map")
        files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not files or not all(isinstance(f, str) and Path(f).name == f for f in files):
            raise CheckpointError(
                f"model_dir: {self._directory / INDEX_FILE}: weight_map must map the names of "
                "tensors to those of files beside it"
            )
        return sorted(files)

    def _open(self, name: str) -> Any:
        try:
            return safe_open(str(self._directory / name), framework="pt", device=self._device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"model_dir: {self._directory / name} cannot be read: {error}"
            ) from None
