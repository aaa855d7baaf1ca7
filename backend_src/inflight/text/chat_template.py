"""Chat messages to the prompt text of one checkpoint.

Templates are written for the environment that transformers gives them; this module offers the same
names (``raise_exception``, ``strftime_now``, ``tojson``, the ``generation`` block), in jinja2's
sandbox, without importing transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, TypedDict

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.errors import CheckpointError, InvalidRequestError

MAX_MESSAGES = 1024
MAX_CONTENT_PARTS = 1024
_FIELD = "messages"
_MAX_REFUSAL_LENGTH = 200


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled template with the special tokens that it may name. Safe to share by threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: name in the template ("bos_token") -> text of the token.

        Raises CheckpointError if the source is not a template.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template is not understood: {error}") from None

    def render(self, messages: list[Message]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises InvalidRequestError with the template's own words where it refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _RefusedByTemplate as refusal:
            reason = str(refusal)[:_MAX_REFUSAL_LENGTH]
            raise _fault(len(messages), f"messages: the chat template says: {reason}") from None
        except Exception:  # a template is a program: given messages it did not expect, it may
            # raise anything; its words may quote the checkpoint's files and stay here
            raise _fault(
                len(messages), "messages: the chat template cannot render this conversation"
            ) from None


def parse_messages(text: str) -> list[Message]:
    """Reads ``[{"role": str, "content": str or text parts}, ...]``, 1 to MAX_MESSAGES of them.

    A text part is ``{"type": "text", "text": str}``; the parts of a message are concatenated. The
    caller bounds the length of ``text``. Raises InvalidRequestError, which never quotes a content.
    """
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise _fault("...", f"is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        raise _fault("...", "is not JSON that can be read") from None
    if not isinstance(loaded, list) or not loaded:
        raise _fault("...", "must be a list of at least one message")
    if len(loaded) > MAX_MESSAGES:
        raise _fault(len(loaded), f"messages: at most {MAX_MESSAGES} are allowed")
    return [_message(place, value) for place, value in enumerate(loaded)]


def _message(place: int, value: object) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise _fault(f"message {place}", "must be an object with role and content")
    unknown = sorted(value.keys() - {"role", "content"})
    if unknown:
        raise _fault(unknown[0], f"(message {place}) is not supported: only role and content are")
    role = value["role"]
    if not isinstance(role, str):
        raise _fault(f"message {place}", "has a role that is not a string")
    message = Message(role=role, content=_content(place, value["content"]))
    try:
        (message["role"] + message["content"]).encode()
    except UnicodeEncodeError:  # JSON's \ud800 escapes make strings that are no text
        raise _fault(f"message {place}", "holds half of a surrogate pair") from None
    return message


def _content(place: int, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fault(f"message {place}", "has a content that is neither a string nor a list")
    if len(value) > MAX_CONTENT_PARTS:
        raise _fault(len(value), f"parts (message {place}): at most {MAX_CONTENT_PARTS} allowed")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or len(part) != 2:
            raise _fault(
                f"message {place}",
                'has a part that is not {"type": "text", "text": ...}: only text is served',
            )
        texts.append(text)
    return "".join(texts)


def _fault(value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(_FIELD, value, limit)


class _RefusedByTemplate(jinja2.TemplateError):
    """The template called raise_exception: its text is meant for whoever wrote the messages."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which would put ``\\u003c`` into prompts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationBlock(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks answers for training: only its body
    matters here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
