"""Reads traces: CSV with a header, or JSON lines; our column names, Mooncake's and Azure's.

A trace file is somebody else's: every line is bounded and checked, and what is wrong with one is
said in one line with its number.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, NamedTuple

from inflight.simulator.trace import MAX_TOKENS, PrefixPiece, TraceError, TraceRequest

MAX_REQUESTS = 1_000_000
MAX_LINE_BYTES = 1 << 20
MAX_PIECES = 4_000_000
"""``hash_ids`` of all requests together."""
MAX_SECONDS = 1e9
MAX_NAME_LENGTH = 256
MOONCAKE_BLOCK = 512
"""Prompt tokens that one of Mooncake's ``hash_ids`` stands for."""

Row = Mapping[str, object]


class _Fault(Exception):
    """What is wrong with a line, without its number."""


class _Dialect(NamedTuple):
    """Column names, and how the arrival column is written."""

    arrival: str
    input_length: str
    output_length: str
    seconds: Callable[[str, object], float]


def load_trace(path: Path, *, max_requests: int | None = None) -> list[TraceRequest]:
    """The requests of a file (the first ``max_requests`` of them; None: all, at most MAX_REQUESTS),
    in order of arrival, the first at 0 seconds.

    Columns (others are ignored): ``arrival`` (seconds), ``input_length``, ``output_length`` and
    optionally ``prefix_group`` with ``prefix_length`` (unset: the whole prompt; prompts of a group
    begin alike); or Mooncake's ``timestamp`` (milliseconds), ``input_length``, ``output_length``,
    ``hash_ids``; or Azure's ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``. An output of 0
    tokens counts as 1, since every context yields one. Raises TraceError.
    """
    try:
        with path.open("rb") as stream:
            requests = list(_requests(path.name, stream, max_requests))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not requests:
        raise TraceError(f"{path.name}: holds no requests")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [request._replace(arrival=request.arrival - first) for request in requests]


def _requests(name: str, stream: BinaryIO, most: int | None) -> Iterator[TraceRequest]:
    columns: list[str] | None = None  # of a CSV header; JSON lines begin with a brace
    num_read = num_pieces = 0
    for number, line in _lines(name, stream):
        try:
            if columns is None and num_read == 0 and not line.startswith("{"):
                columns = _cells(line)
                _dialect(dict.fromkeys(columns))
                continue
            request = _request(_json_row(line) if columns is None else _csv_row(columns, line))
            num_pieces += len(request.prefix)
            if num_read == MAX_REQUESTS:
                raise _Fault(f"there are more than {MAX_REQUESTS} requests")
            if num_pieces > MAX_PIECES:
                raise _Fault(f"hash_ids: more than {MAX_PIECES} up to here")
        except _Fault as fault:
            raise TraceError(f"{name}, line {number}: {fault}") from None
        yield request
        num_read += 1
        if num_read == most:
            return


def _lines(name: str, stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{name}, line {number}: is longer than {MAX_LINE_BYTES} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise TraceError(f"{name}, line {number}: is not UTF-8 text") from None
        if text:
            yield number, text


def _json_row(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _Fault("is not valid JSON") from None
    if not isinstance(row, dict):
        raise _Fault("must hold a JSON object")
    return row


def _csv_row(columns: list[str], line: str) -> Row:
    cells = _cells(line)
    if len(cells) != len(columns):
        raise _Fault(f"has {len(cells)} columns, the header has {len(columns)}")
    return dict(zip(columns, cells, strict=True))


def _cells(line: str) -> list[str]:
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError):
        raise _Fault("is not valid CSV") from None
    return [cell.strip() for cell in cells]


def _request(row: Row) -> TraceRequest:
    dialect = _dialect(row)
    input_length = _whole(row, dialect.input_length, 1, MAX_TOKENS)
    return TraceRequest(
        dialect.seconds(dialect.arrival, row[dialect.arrival]),
        input_length,
        max(1, _whole(row, dialect.output_length, 0, MAX_TOKENS)),
        _prefix(row, input_length),
    )


def _dialect(row: Row) -> _Dialect:
    for dialect in _DIALECTS:
        if all(name in row for name in dialect[:3]):
            return dialect
    known = "; or ".join(", ".join(dialect[:3]) for dialect in _DIALECTS)
    raise _Fault(f"needs the columns {known}")


def _prefix(row: Row, input_length: int) -> tuple[PrefixPiece, ...]:
    if row.get("hash_ids") not in (None, ""):
        return _hashed_blocks(row["hash_ids"], input_length)
    group = row.get("prefix_group")
    if group is None or group == "":
        return ()
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise _Fault("prefix_group: must be a name or a whole number")
    name = str(group)
    if len(name) > MAX_NAME_LENGTH:
        raise _Fault(f"prefix_group: is longer than {MAX_NAME_LENGTH} characters")
    length = input_length
    if row.get("prefix_length") not in (None, ""):
        length = min(length, _whole(row, "prefix_length", 0, MAX_TOKENS))
    return (PrefixPiece(name, length),) if length else ()


def _hashed_blocks(hash_ids: object, input_length: int) -> tuple[PrefixPiece, ...]:
    if isinstance(hash_ids, str):
        hash_ids = _json_list(hash_ids)
    if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
        raise _Fault("hash_ids: must be a list of whole numbers")
    if any(abs(each) >= 1 << 64 for each in hash_ids):
        raise _Fault("hash_ids: must be smaller than 2**64")
    starts = range(0, input_length, MOONCAKE_BLOCK)
    return tuple(
        PrefixPiece(str(each), min(MOONCAKE_BLOCK, input_length - start))
        for each, start in zip(hash_ids, starts, strict=False)
    )


def _json_list(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Fault("hash_ids: must be a list of whole numbers") from None


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _Fault(f"{name}: must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _Fault(f"{name}: {str(value)[:40]!r} is not a number") from None
    if not math.isfinite(number) or abs(number) > MAX_SECONDS * 1000:
        raise _Fault(f"{name}: {str(value)[:40]} is out of range")
    return number


def _whole(row: Row, name: str, least: int, most: int) -> int:
    number = _number(name, row[name])
    if number != int(number) or not least <= number <= most:
        raise _Fault(f"{name}: {number:g} must be a whole number from {least} to {most}")
    return int(number)


def _seconds(name: str, value: object) -> float:
    number = _number(name, value)
    if abs(number) > MAX_SECONDS:
        raise _Fault(f"{name}: {number:g} must be at most {MAX_SECONDS:g} seconds")
    return number


def _milliseconds(name: str, value: object) -> float:
    return _number(name, value) / 1000


_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")


def _instant(name: str, value: object) -> float:
    """Azure's 2023-11-16 18:17:03.9799600, which has more digits than ``datetime`` reads."""
    match = _INSTANT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Fault(f"{name}: {str(value)[:40]!r} is not a date with a time")
    day, fraction, zone = match.groups()
    try:
        instant = datetime.fromisoformat(day + (zone or "+00:00").replace("Z", "+00:00"))
    except ValueError:
        raise _Fault(f"{name}: {str(value)[:40]!r} is not a date with a time") from None
    epoch = datetime(2000, 1, 1, tzinfo=timezone.utc)
    return (instant - epoch).total_seconds() + float(fraction or 0)


_DIALECTS = (
    _Dialect("arrival", "input_length", "output_length", _seconds),
    _Dialect("timestamp", "input_length", "output_length", _milliseconds),
    _Dialect("TIMESTAMP", "ContextTokens", "GeneratedTokens", _instant),
)
