"""Stage: streamed answers, through the real tritonserver where it can run, else of the Executor.

The server needs its wheel and a libpython for its stub; what is missing is said in a row, and the
same load then goes to an Executor in this process. Both get the same random-weight checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from tests.gpu.budget import seconds_left
from tests.gpu.card import is_skipped
from tests.gpu.random_checkpoint import LLAMA_1B, TINY, make_checkpoint
from tests.gpu.rows import Outcome, Row, emit

CARD_KEYS = {"max_num_tokens": 8192, "max_seq_len": 2048}
"""Configuration of the engine on a card, behind either door: the defaults are those of a CPU."""

FALLBACK_SECONDS = 40.0
"""Of the stage, kept for an Executor and the loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that arrive at once, each with a prompt of one token a character."""

    num_streams: int
    prompt_tokens: int
    max_tokens: int

    def prompts(self) -> list[str]:
        """No two have a common beginning, so that nothing is reused."""
        filler = "the quick brown fox jumps over the lazy dog " * (self.prompt_tokens // 44 + 1)
        return [f"{n:08d} {filler}"[: self.prompt_tokens] for n in range(self.num_streams)]


@dataclass(slots=True)
class Stream:
    """When tokens of one answer came."""

    arrivals: list[float] = field(default_factory=list)
    """Seconds since the request was sent, one for each response with tokens."""
    num_tokens: int = 0

    def tokens_came(self, count: int, seconds: float) -> None:
        if count:
            self.num_tokens += count
            self.arrivals.append(seconds)


class Door(Protocol):
    """Something that streams answers; each call serves one load to its end."""

    name: str

    def serve(self, load: Load) -> list[Stream]: ...


def rows_of(door: str, load: Load, streams: Sequence[Stream], seconds: float) -> list[Row]:
    """First token, time between tokens and rate of one load. Answers that are cut short fail."""
    what = f"{door}, {load.num_streams} stream{'s' * (load.num_streams > 1)}"
    short = [stream for stream in streams if stream.num_tokens != load.max_tokens]
    if short:
        note = f"{len(short)} of {len(streams)} answers have not {load.max_tokens} tokens"
        return [Row(what=what, outcome=Outcome.FAILED, note=note)]
    first = statistics.median(stream.arrivals[0] for stream in streams)
    between = statistics.median(
        (stream.arrivals[-1] - stream.arrivals[0]) / max(1, stream.num_tokens - 1)
        for stream in streams
    )
    rate = sum(stream.num_tokens for stream in streams) / seconds
    note = f"prompts of {load.prompt_tokens} tokens, answers of {load.max_tokens}"
    return [
        Row(what=f"{what}: first token, median", value=first * 1e3, unit="ms", note=note),
        Row(what=f"{what}: between tokens, median", value=between * 1e3, unit="ms"),
        Row(what=f"{what}: all streams", value=rate, unit="tokens/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    on_cpu = parser.parse_args().cpu
    if is_skipped("streaming", on_cpu=on_cpu):
        return
    with tempfile.TemporaryDirectory(prefix="inflight-streaming-") as scratch:
        checkpoint = make_checkpoint(
            Path(scratch) / "random-llama",
            TINY if on_cpu else LLAMA_1B,
            torch.float32 if on_cpu else torch.bfloat16,
            "cpu" if on_cpu else "cuda",
        )
        if not on_cpu:
            torch.cuda.empty_cache()  # the server's process needs the memory
        loads = _loads(on_cpu=on_cpu)
        keys = {} if on_cpu else CARD_KEYS
        with _open_door(checkpoint, Path(scratch), keys) as door:
            door.serve(Load(num_streams=2, prompt_tokens=16, max_tokens=4))  # the first is slower
            for load in loads:
                began = time.perf_counter()
                streams = door.serve(load)
                for row in rows_of(door.name, load, streams, time.perf_counter() - began):
                    emit(row)


def _loads(*, on_cpu: bool) -> list[Load]:
    if on_cpu:
        return [Load(num_streams=n, prompt_tokens=64, max_tokens=16) for n in (1, 4)]
    return [Load(num_streams=n, prompt_tokens=512, max_tokens=128) for n in (1, 16, 64)]


def _open_door(
    checkpoint: Path, scratch: Path, keys: Mapping[str, int]
) -> AbstractContextManager[Door]:
    """A server that cannot be here is skipped, and one that does not get ready has failed."""
    from tests.gpu.streaming_executor import ExecutorDoor
    from tests.gpu.streaming_server import ServerDoor, ServerMissingError, ServerNotReadyError

    try:
        return ServerDoor(checkpoint, scratch, keys, seconds_left() - FALLBACK_SECONDS)
    except (ServerMissingError, ServerNotReadyError) as error:
        is_missing = isinstance(error, ServerMissingError)
        outcome = Outcome.SKIPPED if is_missing else Outcome.FAILED
        note = f"{error}; the Executor in this process instead"
        emit(Row(what="tritonserver", outcome=outcome, note=note))
        return ExecutorDoor(checkpoint, keys)


if __name__ == "__main__":
    main()
