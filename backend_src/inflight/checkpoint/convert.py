"""The conversion process: ``python -m inflight.checkpoint.convert JOB SOURCE TARGET PARENT``.

Standard output carries nothing but lines of ``conversion.PROGRESS_PREFIX`` and, at a failure, one
of ``conversion.ERROR_PREFIX``; what libraries print goes to standard error. Nothing is fetched
from a hub and no code of a checkpoint is run. The process ends when PARENT, the id of the process
that started it, is no longer its parent.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inflight.checkpoint.conversion import ERROR_PREFIX, PROGRESS_PREFIX
from inflight.checkpoint.files import GGUF_BLOCKS_FILE
from inflight.checkpoint.gguf_blocks import save_gguf_blocks
from inflight.checkpoint.locate import Job

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_LINKED_PATTERNS = (
    "config.json", "generation_config.json", "*.safetensors*", GGUF_BLOCKS_FILE,
)  # fmt: skip
_BYTES_PER_WEIGHT = 4
_PARENT_CHECK_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    job, source, target = Job(arguments[0]), Path(arguments[1]), Path(arguments[2])
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _end_with_parent(int(arguments[3]))

    def progress(line: str) -> None:
        report.write(f"{PROGRESS_PREFIX}{line}\n")

    try:
        if job is Job.GGUF:
            _convert_gguf(source, target, progress)
        elif job is Job.TOKENIZER:
            _convert_tokenizer(source, target)
        else:
            _complete_config(source, target)
        _apply_umask(target)
    except Exception as error:
        lines = str(error).strip().splitlines()
        report.write(f"{ERROR_PREFIX}{lines[0] if lines else type(error).__name__}\n")
        return 1
    return 0


def _convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    _ask_gguf_once()
    _check_space(source, target)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(1)  # at a first start compilers have the other cores, and teams wait
    progress(f"{source.name}: reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **_LOCAL)
    progress(f"{source.name}: reading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        **_LOCAL,
    )
    progress(f"{source.name}: writing the checkpoint")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    save_gguf_blocks(model, source, target)


def _ask_gguf_once() -> None:
    """transformers asks the package gguf for a file's reader at each thing that it wants to know,
    and for the table of tensor names at each module of the model; either takes seconds in all, and
    the answers never differ in a process that reads one file. So they are kept."""
    import gguf

    gguf.GGUFReader = functools.cache(_plain_reader())
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def _plain_reader() -> type:
    """gguf's reader over the same mapped bytes as an array without numpy's memmap class, which
    makes each of a vocabulary's hundred thousand slices several times as expensive."""
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    return PlainReader


def _check_space(source: Path, target: Path) -> None:
    import gguf

    weights = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(source)).tensors)
    needed, free = weights * _BYTES_PER_WEIGHT, shutil.disk_usage(target).free
    if free < needed:
        raise OSError(
            f"{needed / 1e9:.1f} GB are needed in cache_dir, {free / 1e9:.1f} GB are free"
        )


def _convert_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **_LOCAL)
    tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ValueError("its tokenizer has no form as tokenizer.json")
    for pattern in _LINKED_PATTERNS:
        for path in source.glob(pattern):
            (target / path.name).symlink_to(path.resolve())


def _complete_config(source: Path, target: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(source, **_LOCAL).to_json_file(
        target / "config.json", use_diff=False
    )


def _apply_umask(target: Path) -> None:
    """safetensors makes files for their owner's eyes only; a cache may have several users."""
    umask = os.umask(0)
    os.umask(umask)
    for path in target.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def _end_with_parent(parent: int) -> None:
    """An orphan would go on for minutes with a core and gigabytes that nobody waits for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)  # all is written, and taking torch down in order takes a second
