"""Calibration: what was measured on one machine, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

from inflight.errors import ConfigError
from inflight.simulator.cost_model import CostModel
from inflight.simulator.tiers import Bandwidth

_MAX_FILE_BYTES = 1 << 16
_TIERS = ("host", "disk")
_WAYS = Bandwidth._fields


class Calibration(NamedTuple):
    cost: CostModel
    host: Bandwidth | None = None
    """Of the tier in host memory; None: not measured."""
    disk: Bandwidth | None = None


def save_calibration(path: Path, calibration: Calibration) -> None:
    """As JSON, as ``load_calibration`` reads it: the fields of the cost model, and of each tier
    ``TIER_down`` and ``TIER_up`` in bytes a second. Raises ConfigError where it cannot be written.
    """
    values = asdict(calibration.cost)
    for tier in _TIERS:
        bandwidth: Bandwidth | None = getattr(calibration, tier)
        if bandwidth is not None:
            values |= {f"{tier}_{way}": getattr(bandwidth, way) for way in _WAYS}
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cost model {path}: {error.strerror}") from None


def load_calibration(path: Path) -> Calibration:
    """Raises ConfigError that names the file and what is wrong in it."""
    values = _numbers(path)
    try:
        tiers = {tier: _take_bandwidth(values, tier) for tier in _TIERS}
        return Calibration(CostModel(**values), **tiers)
    except ConfigError as error:
        raise ConfigError(f"cost model {path}: {error}") from None


def _numbers(path: Path) -> dict[str, float]:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES)
        values = json.loads(content)
    except OSError as error:
        raise ConfigError(f"cost model {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"cost model {path}: not valid JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"cost model {path}: must hold a JSON object")
    coefficients = {item.name for item in fields(CostModel)}
    known = coefficients | {f"{tier}_{way}" for tier in _TIERS for way in _WAYS}
    required = coefficients - {"weight_read_seconds"}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"cost model {path}: {unknown[0][:40]}: there is no such coefficient")
    if missing := sorted(required - set(values)):
        raise ConfigError(f"cost model {path}: {missing[0]} is missing")
    if any(type(value) not in (int, float) for value in values.values()):
        raise ConfigError(f"cost model {path}: coefficients must be numbers")
    try:
        return {name: float(value) for name, value in values.items()}
    except OverflowError:
        raise ConfigError(f"cost model {path}: a number is too large") from None


def _take_bandwidth(values: dict[str, float], tier: str) -> Bandwidth | None:
    """Out of ``values``. Raises ConfigError where one way is missing or not positive."""
    found = {way: values.pop(f"{tier}_{way}", None) for way in _WAYS}
    if all(speed is None for speed in found.values()):
        return None
    for way, speed in found.items():
        if speed is None:
            raise ConfigError(f"{tier}_{way} is missing")
    bandwidth = Bandwidth(**{way: speed for way, speed in found.items() if speed is not None})
    if not bandwidth.is_possible:
        raise ConfigError(f"{tier}_down, {tier}_up: must be larger than 0")
    return bandwidth
