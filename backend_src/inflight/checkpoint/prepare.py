"""prepare_checkpoint: locate, convert where needed, describe."""

from __future__ import annotations

from collections.abc import Callable

from inflight.checkpoint.cache import ConversionCache
from inflight.checkpoint.files import read_json
from inflight.checkpoint.locate import Job, locate
from inflight.checkpoint.metadata import Checkpoint, describe, says_everything


def _tell_nobody(line: str) -> None:
    pass


def prepare_checkpoint(
    model_dir: str, cache_dir: str, *, progress: Callable[[str], None] = _tell_nobody
) -> Checkpoint:
    """A checkpoint that can be loaded as it lies.

    ``model_dir``: a folder with config.json, a .gguf file, a folder with one .gguf file, or "" for
    the embedded model. GGUF files and folders without tokenizer.json are converted into
    ``cache_dir`` ("" is ~/.cache/inflight), once; processes that come meanwhile wait.
    ``progress`` gets one line when a conversion starts, at its steps, and when another process's
    is waited for. Raises ConfigError: one line that says what is wrong and what to do.
    """
    source = locate(model_dir)
    cache = ConversionCache(cache_dir, progress=progress)
    directory = source.path if source.job is None else cache.converted(source.job, source.path)
    config = read_json(directory / "config.json")
    if not says_everything(config):
        config = read_json(cache.converted(Job.CONFIG, directory) / "config.json")
    return describe(directory, source.name, config)
