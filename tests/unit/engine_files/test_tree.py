"""Dataclasses come back from JSON and tensors as they were, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from inflight.engine_files.tree import flatten, restore
from tests.unit.engine_files.contents import Model, assert_same, make_model


def test_everything_comes_back() -> None:
    model = make_model()
    tree, tensors = flatten(model)
    assert_same(restore(Model, json.loads(json.dumps(tree)), tensors), model)


def test_a_value_that_cannot_be_stored_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="set cannot be stored"):
        flatten({1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("colour", "green"),
        ("kind", "f16"),
        ("is_tied", 1),
        ("is_tied", None),
        ("factors", [1, 2]),
        ("size", [4]),
        ("table", {"tensor": 99}),
        ("table", 3),
        ("layers", [{"type": "Model", "fields": {}}]),
        ("layers", [{"type": "Dense", "fields": {}}]),
        ("layers", [None]),
    ],
    ids=str,
)
def test_what_has_another_type_is_refused(field: str, value: Any) -> None:
    tree, tensors = flatten(make_model())
    tree["fields"][field] = value
    with pytest.raises((TypeError, ValueError, KeyError, IndexError)):
        restore(Model, tree, tensors)


@pytest.mark.parametrize("change", [{"no_such_field": 1}, {"table": None}], ids=str)
def test_fields_are_those_of_the_class(change: dict[str, Any]) -> None:
    tree, tensors = flatten(make_model())
    tree["fields"] = {k: v for k, v in (tree["fields"] | change).items() if v is not None}
    with pytest.raises((TypeError, KeyError)):
        restore(Model, tree, tensors)


def test_one_tensor_is_one_place() -> None:
    tree, tensors = flatten(make_model())
    assert all(isinstance(each, torch.Tensor) for each in tensors)
    assert json.dumps(tree).count('"tensor"') == len(tensors)
