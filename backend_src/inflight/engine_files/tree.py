"""Dataclasses of tensors and plain values, as JSON beside a list of tensors, and back.

Every field is stored, whatever it is called: a new field of the weights needs nothing here. What
comes back is built by the dataclasses' own constructors, so their checks hold for files too.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal

from torch import Tensor

_PLAIN = (bool, int, float, str)


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """The JSON, and the tensors that it names by their place in the list."""
    tensors: list[Tensor] = []
    return _encode(value, tensors), tensors


def restore(kind: Any, tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of type ``kind`` that ``flatten`` was given.

    Raises ValueError, TypeError, KeyError or IndexError for a tree of another type, and what the
    constructors raise.
    """
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _restore_union(kind, tree, tensors)
    if origin is tuple:
        return _restore_tuple(typing.get_args(kind), tree, tensors)
    if origin is Literal:
        return typing.get_args(kind)[typing.get_args(kind).index(tree)]
    if kind is types.NoneType and tree is None:
        return None
    if kind is Tensor:
        return tensors[tree["tensor"]]
    if is_dataclass(kind) and isinstance(kind, type):
        return _restore_fields(kind, tree, tensors)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(tree)
    if kind in _PLAIN and type(tree) is kind:
        return tree
    raise TypeError(f"{tree!r:.40} is no {kind}")


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return {
            "type": type(value).__name__,
            "fields": {name: _encode(each, tensors) for name, each in values.items()},
        }
    if isinstance(value, tuple):
        return [_encode(each, tensors) for each in value]
    if isinstance(value, Enum):
        return value.value
    assert value is None or type(value) in _PLAIN, f"{type(value).__name__} cannot be stored"
    return value


def _restore_tuple(kinds: tuple[Any, ...], tree: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(restore(kinds[0], each, tensors) for each in tree)
    return tuple(
        restore(each_kind, each, tensors) for each_kind, each in zip(kinds, tree, strict=True)
    )


def _restore_fields(kind: type[Any], tree: Any, tensors: Sequence[Tensor]) -> Any:
    if tree["type"] != kind.__name__:
        raise TypeError(f"{tree['type']!r:.40} is no {kind.__name__}")
    hints = typing.get_type_hints(kind)
    values = {name: restore(hints[name], each, tensors) for name, each in tree["fields"].items()}
    return kind(**values)


def _restore_union(union: Any, tree: Any, tensors: Sequence[Tensor]) -> Any:
    """By the first member that takes ``tree``; those of the weights exclude each other."""
    for member in typing.get_args(union):
        try:
            return restore(member, tree, tensors)
        except (TypeError, KeyError, ValueError):
            continue
    raise TypeError(f"{tree!r:.40} is no {union}")
