"""Checkpoint: the few facts of a checkpoint folder that its users need, from its JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.checkpoint.files import read_json_if_there
from inflight.errors import CheckpointError

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
"""What architectures call the longest sequence, in tokens."""

_VOCABULARY_KEYS = ("vocab_size", "padded_vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder with config.json, tokenizer.json and safetensors weights, ready to be loaded."""

    directory: Path
    model_type: str
    """``model_type`` of config.json."""
    end_ids: tuple[int, ...]
    """Ids that end a generation; () where the checkpoint names none."""
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    vocab_size: int
    """Of the configuration; the tokenizer may know fewer ids."""
    name: str
    """For people: the folder's or the GGUF file's name."""


def says_everything(config: Mapping[str, Any]) -> bool:
    """False when a configuration leaves facts of Checkpoint to the defaults of its class."""
    return all(_first_of(config, keys) is not None for keys in (_LENGTH_KEYS, _VOCABULARY_KEYS))


def describe(directory: Path, name: str, config: Mapping[str, Any]) -> Checkpoint:
    """``config``: config.json, complete. Raises CheckpointError for values that make no sense."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"model_dir: {directory}: config.json has no model_type")
    return Checkpoint(
        directory=directory,
        model_type=model_type,
        end_ids=_end_ids(directory, config),
        max_position_embeddings=_positive(directory, config, _LENGTH_KEYS),
        vocab_size=_positive(directory, config, _VOCABULARY_KEYS),
        name=name,
    )


def _first_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of ``keys`` that is set; multimodal configurations nest them in ``text_config``."""
    nested = config.get("text_config")
    for level in (config, nested if isinstance(nested, dict) else {}):
        for key in keys:
            if level.get(key) is not None:
                return level[key]
    return None


def _positive(directory: Path, config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    value = _first_of(config, keys)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"model_dir: {directory}: config.json: {keys[0]}: {value!r} must be 1 or larger"
        )
    return value


def _end_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json, else of config.json, else the tokenizer's own."""
    generation = read_json_if_there(directory / "generation_config.json")
    for source in (generation.get("eos_token_id"), _first_of(config, ("eos_token_id",))):
        if source is None:
            continue
        ids = source if isinstance(source, list) else [source]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise CheckpointError(
                f"model_dir: {directory}: eos_token_id: {source!r} must be an id or a list of ids"
            )
        return tuple(dict.fromkeys(ids))
    return _tokenizer_end_ids(directory)


def _tokenizer_end_ids(directory: Path) -> tuple[int, ...]:
    token = read_json_if_there(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):  # an AddedToken, with its options
        token = token.get("content")
    if not isinstance(token, str):
        return ()
    tokenizer = read_json_if_there(directory / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    return (int(added[token]),) if token in added else ()
