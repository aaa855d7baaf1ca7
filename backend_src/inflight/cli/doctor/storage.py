"""Where things are kept: the cache, the disk below it, and huge pages for the weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from inflight.cache_folder import cache_root
from inflight.cli.doctor.finding import Finding, Status, size_text
from inflight.native.cpu import gives_huge_pages

_PARTS = {"checkpoints": "converted checkpoints", "native": "kernels", "engines": "built engines"}


def look_at_cache(cache_dir: str) -> Finding:
    """What lies in it, and whether more can be put there."""
    root = cache_root(cache_dir)
    sizes = {name: size_of(root / part) for part, name in _PARTS.items()}
    held = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    found = f"{root}: {held or 'empty'}"
    if _can_be_written(root):
        means = "a start finds its work done" if held else "the first start fills it"
        return Finding(what="cache", found=found, means=means)
    return Finding(
        what="cache",
        found=f"{found}; this user cannot write there",
        means="what is not there yet cannot be converted or built",
        status=Status.NOTE if held else Status.BAD,
        remedy="--cache-dir FOLDER (INFLIGHT_CACHE_DIR)",
    )


def look_at_disk(cache_dir: str, needed_bytes: int | None) -> Finding:
    """``needed_bytes``: what a first start of this checkpoint writes; None: nobody knows yet."""
    root = _nearest(cache_root(cache_dir))
    free = shutil.disk_usage(root).free
    found = f"{size_text(free)} free below {root}"
    if needed_bytes is None:
        means = "what a first start writes cannot be told before the checkpoint is converted"
        return Finding(what="disk", found=found, means=means)
    if free >= needed_bytes:
        means = f"a first start writes about {size_text(needed_bytes)}"
        return Finding(what="disk", found=found, means=means)
    return Finding(
        what="disk",
        found=found,
        means=f"too little for a first start, which writes about {size_text(needed_bytes)}",
        status=Status.NOTE if size_of(cache_root(cache_dir)) else Status.BAD,
        remedy="make room, or --cache-dir FOLDER on another disk",
    )


def look_at_huge_pages() -> Finding:
    """Weights are read once for each token, and small pages slow that down."""
    if gives_huge_pages():
        means = "weights and KV cache lie in huge pages"
        return Finding(what="huge pages", found="the system gives them", means=means)
    return Finding(
        what="huge pages",
        found="the system gives none",
        means="reading weights on the CPU is slower",
        status=Status.NOTE,
        remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def size_of(folder: Path) -> int:
    """Bytes of the files below it; 0 where there is none."""
    total = 0
    for directory, _, files in os.walk(folder):
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
    return total


def _can_be_written(folder: Path) -> bool:
    return os.access(_nearest(folder), os.W_OK | os.X_OK)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
