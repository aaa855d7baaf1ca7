"""The keys of InflightConfig as a person reads them; options and documentation are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.api.config import InflightConfig


@dataclass(frozen=True, slots=True)
class ConfigKey:
    name: str
    kind: str
    """``string``, ``integer``, ``number`` or ``boolean``."""
    limits: str
    """What a number must satisfy, such as ``>= 1, <= 4096``; empty where anything goes."""
    choices: tuple[str, ...]
    """The only values there are; empty for a free value."""
    default: str
    meaning: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def accepted(self) -> str:
        """Kind and limits, or the choices, in one phrase."""
        return ", ".join(self.choices) or f"{self.kind} {self.limits}".strip()


def config_keys() -> tuple[ConfigKey, ...]:
    """Every key, in the order of the class. Kinds and limits come from its JSON schema."""
    schema = InflightConfig.model_json_schema()
    definitions = schema.get("$defs", {})
    keys = []
    for name, field in InflightConfig.model_fields.items():
        value = _value_schema(schema["properties"][name], definitions)
        keys.append(
            ConfigKey(
                name=name,
                kind=value["type"],
                limits=_limits(value),
                choices=_choices(value),
                default=_shown(field.default),
                meaning=field.description or "",
            )
        )
    return tuple(keys)


def _value_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of the value itself: not of a reference to it, nor of "it or null"."""
    if "anyOf" in schema:
        schema = next(part for part in schema["anyOf"] if part.get("type") != "null")
    if "$ref" in schema:
        return dict(definitions[schema["$ref"].rpartition("/")[2]])
    return schema


def _choices(schema: dict[str, Any]) -> tuple[str, ...]:
    if schema["type"] == "boolean":
        return ("true", "false")
    if "const" in schema:
        return (str(schema["const"]),)
    return tuple(schema.get("enum", ()))


def _limits(schema: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {schema[word]}" for word, sign in signs.items() if word in schema)


def _shown(value: object) -> str:
    if value is None or value == "":
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "value", value))
