"""``inflight build --report``: what each dtype costs in accuracy, on a text that Python ships."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from inflight.cli.build import Built
from inflight.cli.memory import available_memory, check_memory
from inflight.errors import ConfigError
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.model.accuracy import Logits

TEXT_NAME = "pydoc_data.topics of the Python standard library"
WINDOW = 512
NUM_WINDOWS = 3
_SKIPPED_CHARS = 4_000
_CHARS = 40_000
"""Enough for the windows in any tokenizer that knows English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to compute the model."""

    computed_by: str
    dtype: str
    kv_cache_dtype: str
    perplexity: float
    error: float
    """Of the logits from transformers' in fp32: root mean square, relative to their spread."""
    same_as_fp32: float
    """Share of positions with the same likeliest token as transformers in fp32."""
    same_as_bf16: float | None
    """As our own bf16; None in the rows before it."""


def report(built: Built, say: Callable[[str], None], *, as_json: bool) -> None:
    """Prints one table, or one JSON object. Every dtype is built where it is not there yet.

    Raises StartupError when the weights do not fit into memory in fp32.
    """
    check_memory(built.checkpoint.directory, "fp32", available_memory())
    rows = list(_rows(built, say))
    if as_json:
        facts = {"text": TEXT_NAME, "num_tokens": WINDOW * NUM_WINDOWS, "window": WINDOW}
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        Console(width=100).print(_table(rows, built.checkpoint.name))


def _rows(built: Built, say: Callable[[str], None]) -> Iterator[Row]:
    windows = _windows(built)
    say("computing with transformers in fp32")
    exact = _of_transformers(built, windows, "fp32")
    bf16: list[Logits] | None = None

    def row(logits: list[Logits], computed_by: str, dtype: str, kv: str) -> Row:
        return _row(logits, windows, exact, bf16, (computed_by, dtype, kv))

    yield row(exact, "transformers", "fp32", "-")
    say("computing with transformers in bf16")
    yield row(_of_transformers(built, windows, "bf16"), "transformers", "bf16", "-")
    for dtype, kv in _ways():
        say(f"computing with inflight in {dtype}, KV cache {kv}")
        try:
            logits = _of_ours(built, windows, dtype, kv)
        except ConfigError as error:
            say(f"{dtype} is left out: {error}")
            continue
        bf16 = logits if (dtype, kv) == ("bf16", "auto") else bf16
        yield row(logits, "inflight", dtype, kv)


def _ways() -> Iterator[tuple[str, str]]:
    """(dtype, kv_cache_dtype) of our rows."""
    yield from ((dtype, "auto") for dtype in ("fp32", "bf16", "int8", "int4"))
    yield "bf16", "int8"


def _windows(built: Built) -> list[list[int]]:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[key] for key in sorted(topics))
    tokenizer = Tokenizer.from_directory(built.checkpoint.directory)
    ids = tokenizer.encode(text[_SKIPPED_CHARS : _SKIPPED_CHARS + _CHARS])
    starts = range(0, WINDOW * NUM_WINDOWS, WINDOW)
    return [ids[start : start + WINDOW] for start in starts]


def _of_transformers(built: Built, windows: list[list[int]], dtype: str) -> list[Logits]:
    import torch

    from inflight.model.dtypes import DTYPES
    from inflight.model.loading import load_model

    model: Any = load_model(
        built.checkpoint.directory, dtype=DTYPES[dtype], device=torch.device("cpu")
    )
    with torch.inference_mode():
        return [
            model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy() for ids in windows
        ]


def _of_ours(built: Built, windows: list[list[int]], dtype: str, kv: str) -> list[Logits]:
    from inflight.model.accuracy import TextReader
    from inflight.model.factory import load_runner

    config = built.config.model_copy(
        update={
            "dtype": dtype,
            "kv_cache_dtype": kv,
            "max_num_tokens": WINDOW,
            "max_seq_len": WINDOW,
        }
    )
    reader = TextReader(
        load_runner(built.checkpoint.directory, config),
        window=WINDOW,
        tokens_per_block=config.tokens_per_block,
    )
    return [reader.logits(ids) for ids in windows]


def _row(
    logits: list[Logits],
    windows: list[list[int]],
    exact: list[Logits],
    bf16: list[Logits] | None,
    way: tuple[str, str, str],
) -> Row:
    from inflight.model.accuracy import deviation, negative_log_likelihoods

    surprises = [negative_log_likelihoods(*pair) for pair in zip(logits, windows, strict=True)]
    from_exact = [deviation(*pair) for pair in zip(logits, exact, strict=True)]
    from_bf16 = [deviation(*pair) for pair in zip(logits, bf16 or (), strict=False)]
    return Row(
        computed_by=way[0],
        dtype=way[1],
        kv_cache_dtype=way[2],
        perplexity=float(np.exp(np.concatenate(surprises).mean())),
        error=float(np.sqrt(np.mean([each.error**2 for each in from_exact]))),
        same_as_fp32=float(np.mean([each.agreement for each in from_exact])),
        same_as_bf16=float(np.mean([each.agreement for each in from_bf16])) if bf16 else None,
    )


def _table(rows: list[Row], name: str) -> Table:
    table = Table(title=f"{name} on {WINDOW * NUM_WINDOWS} tokens of {TEXT_NAME}")
    for column in ("computed by", "weights", "KV cache"):
        table.add_column(column)
    for column in ("perplexity", "error / spread", "likeliest as fp32", "likeliest as bf16"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.computed_by,
            row.dtype,
            row.kv_cache_dtype,
            f"{row.perplexity:.3f}",
            f"{row.error:.4f}",
            f"{row.same_as_fp32:.1%}",
            "" if row.same_as_bf16 is None else f"{row.same_as_bf16:.1%}",
        )
    return table
