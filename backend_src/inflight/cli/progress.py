"""How a build shows where it is: a bar on a terminal, else a line for each thing that is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def build_progress(say: Callable[[str], None]) -> Iterator[Callable[[str, float], None]]:
    """Yields ``progress(what, share)``, with the share of the whole in [0, 1]; ``say`` takes lines.

    The bar appears with the first report and goes when the block ends.
    """
    if not sys.stdout.isatty():
        yield _lines(say)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(), transient=True) as bar:
        task = bar.add_task("building the engine", total=1.0, visible=False)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share, visible=True)

        yield show


def _lines(say: Callable[[str], None]) -> Callable[[str, float], None]:
    said: list[str] = []

    def show(what: str, share: float) -> None:
        if what not in said:
            said.append(what)
            say(f"building the engine: {what} ({share:.0%})")

    return show
