"""The tokenizer files of a Hugging Face checkpoint, read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers.processors import TemplateProcessing

from inflight.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerFiles(NamedTuple):
    backend: tokenizers.Tokenizer
    """Neither truncates nor pads; knows every special token as special."""
    special_tokens: dict[str, str]
    """Name in a chat template ("bos_token") -> text of the token."""
    chat_template: str | None
    """Source of the template; None where the checkpoint has none."""


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Raises CheckpointError that names the file."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: has no {TOKENIZER_FILE}: only checkpoints with a fast tokenizer are "
            "served (transformers' save_pretrained writes one)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise CheckpointError(f"{path}: not understood: {error}") from None
    config = _read_json(directory / _SPECIAL_TOKENS_FILE) | _read_json(directory / _CONFIG_FILE)
    special_tokens = {
        name: text for name in _NAMES if (text := _token_text(config.get(name))) is not None
    }
    backend.no_truncation()
    backend.no_padding()
    _mark_special(backend, {*special_tokens.values(), *_further_special_tokens(config)})
    if "add_bos_token" in config or "add_eos_token" in config:
        _set_bos_eos(backend, config, special_tokens)
    return TokenizerFiles(backend, special_tokens, _chat_template(directory, config))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not understood: {error}") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return loaded


def _token_text(value: object) -> str | None:
    """A token stands as its text, or as an object with the text in ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _further_special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens that have no name of their own, in each place where they may stand."""
    listed: list[object] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        listed.extend(value.values() if isinstance(value, dict) else value)
    by_id = config.get("added_tokens_decoder") or {}
    listed.extend(token for token in by_id.values() if token.get("special"))
    for value in listed:
        if (text := _token_text(value)) is not None:
            yield text


def _mark_special(backend: tokenizers.Tokenizer, texts: set[str]) -> None:
    """Makes tokens special that the vocabulary has but tokenizer.json leaves unmarked.

    Names of tokens that are in no vocabulary are dropped: no model can say them.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in sorted(texts):
        if backend.token_to_id(text) is None:
            continue
        token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _set_bos_eos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """``add_bos_token`` and ``add_eos_token``, where a config has them, overrule tokenizer.json."""

    def wanted(name: str) -> list[str]:
        token = special_tokens.get(name)
        known = token is not None and backend.token_to_id(token) is not None
        return [token] if token is not None and known and config.get(f"add_{name}") else []

    bos, eos = wanted("bos_token"), wanted("eos_token")
    backend.post_processor = TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *bos, "$B:1", *eos],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
    )


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The file wins over the config; of several named templates the one called "default" counts."""
    path = directory / _TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not understood: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
