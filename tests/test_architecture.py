"""The rooms of the house: imports point one way, and outside worlds are touched in one place.

The order is that of docs/architecture.md; a module may import its own room and the rooms listed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "backend_src" / "inflight"

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "cache_folder": {"errors"},
    "api": {"errors"},
    "batch": {"api", "errors"},
    "checkpoint": {"native", "cache_folder", "api", "errors"},  # native: its converter alone
    "kv_cache": {"api", "errors"},
    "kv_events": {"kv_cache", "api", "errors"},
    "scheduler": {"batch", "api", "errors"},
    "kernels": {"errors"},
    "native": {"cache_folder", "errors"},
    "engine_files": {"native", "checkpoint", "cache_folder", "api", "errors"},
    "model": {
        "kernels", "native", "engine_files", "cache_folder", "checkpoint", "batch", "api", "errors",
    },
    "sampling": {"batch", "api", "errors"},
    "text": {"checkpoint", "batch", "api", "errors"},
    "observability": {"api", "errors"},
    "engine": {
        "scheduler", "model", "sampling", "text", "kv_cache", "batch", "observability", "api",
        "errors",
    },
    "simulator": {"engine", "scheduler", "kv_cache", "batch", "api", "errors"},
    "executor": {
        "engine", "scheduler", "model", "sampling", "text", "kv_cache", "kv_events", "checkpoint",
        "batch", "observability", "api", "errors",
    },
    "tritonserver": {
        "executor", "text", "checkpoint", "observability", "api", "errors",
        "native",  # cpu.py alone
    },
}  # fmt: skip
UNRESTRICTED = {"cli", "__init__"}

TORCH_ROOMS = {"model", "kernels", "native", "engine_files"}
PB_UTILS_ROOMS = {"tritonserver"}
ENVIRONMENT_FILES = {"api/config.py"}

FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room in UNRESTRICTED:
        return
    modules = imported_modules(ast.parse(path.read_text()))
    rooms = {name.split(".")[1] for name in modules if name.startswith("inflight.")}
    wrong = rooms - ALLOWED[room] - {room}
    assert not wrong, f"{room} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_outside_worlds_have_one_door(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules = {name.split(".")[0] for name in imported_modules(tree)}
    room = room_of(path)
    if room not in TORCH_ROOMS | {"checkpoint", "cli"}:
        assert "torch" not in modules, "torch belongs to model, kernels and native"
    if room not in PB_UTILS_ROOMS:
        assert "triton_python_backend_utils" not in modules
    if str(path.relative_to(SOURCE)) not in ENVIRONMENT_FILES:
        touched = [
            n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "environ"
        ]
        assert not touched, "os.environ is read in api/config.py alone"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert path.read_text().count("\n") <= 330, "over 300 lines a concept is missing"
