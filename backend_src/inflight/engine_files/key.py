"""EngineKey: what an engine was made of. Two equal keys are the same engine.

Reading one needs no torch, so that ``inflight serve`` knows whether there is something to build.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import inflight
from inflight.checkpoint.hashes import content_hash
from inflight.native.cpu import cpu_kind

_PACKAGE = Path(inflight.__file__).parent
_WHAT_DECIDES_THE_BYTES = (
    "engine_files/*.py",
    "model/fused/*.py",
    "model/dtypes.py",  # which kind of block a dtype is
    "model/loading.py",  # what the proof's logits are computed with
    "model/probe_course.py",  # of which tokens the proof keeps logits
    "native/packed.py",
    "native/quantize.py",
    "native/gguf_blocks.py",
    "native/src/linear*.h",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKey:
    checkpoint: str
    """SHA-256 of the checkpoint's configuration and weights."""
    dtype: str
    """Value of the configuration key, never auto."""
    cpu: str
    """Machine and instruction sets."""
    code: str
    """SHA-256 of the sources that read, pack and store weights: the format is one of them."""

    @property
    def name(self) -> str:
        """Of the engine's folder."""
        return hashlib.sha256("\0".join(astuple(self)).encode()).hexdigest()

    def is_another_version_of(self, other: EngineKey) -> bool:
        """The same engine, but for the code that made it."""
        ours, theirs = (self.checkpoint, self.dtype, self.cpu), (
            other.checkpoint, other.dtype, other.cpu,
        )  # fmt: skip
        return ours == theirs and self.code != other.code


def engine_key(checkpoint_directory: Path, dtype: str, cache_dir: str) -> EngineKey:
    """``dtype`` and ``cache_dir``: of the configuration; ``dtype`` never auto, which is not the
    same wherever one cache is used. Takes seconds for large weights that were never hashed. Raises
    CheckpointError when they cannot be read."""
    assert dtype != "auto"
    return EngineKey(
        checkpoint=content_hash(checkpoint_directory, cache_dir),
        dtype=dtype,
        cpu=cpu_kind(),
        code=_code_hash(),
    )


@cache
def _code_hash() -> str:
    # transformers gives the rope frequencies that an engine stores.
    digest = hashlib.sha256(f"{version('transformers')}\0".encode())
    for pattern in _WHAT_DECIDES_THE_BYTES:
        for path in sorted(_PACKAGE.glob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
