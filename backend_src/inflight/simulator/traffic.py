"""Traffic: traces made from a description, with a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.simulator.trace import MAX_TOKENS, PrefixPiece, TraceRequest

_P95 = 1.6448536269514722
"""Standard deviations below which 95% of a normal distribution lie."""

_NAMES = ("mean", "p50", "p95")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, distributed log-normally: exp(mu + sigma * normal)."""

    mu: float
    sigma: float

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        """``"300"`` (always that), or two of mean, p50 and p95: ``"p50=200,p95=900"``.

        Raises ConfigError that names ``name`` and what is wrong.
        """
        parts = dict(_parts(name, text))
        if set(parts) == {""}:
            return cls(math.log(parts[""]), 0.0)
        if len(parts) != 2 or not parts.keys() <= set(_NAMES):
            raise ConfigError(f"{name}: {text[:80]!r}: a number, or two of {', '.join(_NAMES)}")
        low, high = (parts[each] for each in _NAMES if each in parts)
        if "mean" in parts and "p50" in parts:
            low, high = high, low  # the mean of a log-normal distribution is above its median
        if low > high:
            raise ConfigError(f"{name}: {text[:80]!r}: needs p50 <= mean <= p95")
        ratio = math.log(high / low)
        if "p95" not in parts:
            return cls(math.log(low), math.sqrt(2 * ratio))
        if "mean" not in parts:
            return cls(math.log(low), ratio / _P95)
        # ln p95 - ln mean = P95 * sigma - sigma^2 / 2, the smaller root.
        root = _P95 * _P95 - 2 * ratio
        if root < 0:
            raise ConfigError(f"{name}: {text[:80]!r}: p95 is too far above the mean; give p50")
        sigma = _P95 - math.sqrt(root)
        return cls(math.log(high) - _P95 * sigma, sigma)

    @property
    def mean(self) -> float:
        return math.exp(self.mu + self.sigma * self.sigma / 2)

    @property
    def p95(self) -> float:
        return math.exp(self.mu + _P95 * self.sigma)

    def draw(self, rng: random.Random, most: int) -> int:
        """A length in 1..most."""
        return max(1, min(most, round(rng.lognormvariate(self.mu, self.sigma))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a service expects."""

    input_lengths: Lengths
    output_lengths: Lengths
    requests_per_second: float
    """Of a Poisson process; inf: all at once."""
    shared_prefix: int = 0
    """Prompt tokens that requests of a group have in common."""
    num_groups: int = 1

    def trace(self, num_requests: int, *, seed: int, max_seq_len: int) -> list[TraceRequest]:
        """``num_requests`` requests of at most ``max_seq_len`` (>= 2) tokens each. The shared
        prefix is part of the input length, and at least one token of a prompt is its own."""
        rng = random.Random(seed)
        now = 0.0
        requests = []
        for _ in range(num_requests):
            input_length = self.input_lengths.draw(rng, min(max_seq_len - 1, MAX_TOKENS))
            output_length = self.output_lengths.draw(rng, max_seq_len - input_length)
            shared = min(self.shared_prefix, input_length - 1)
            group = f"group {rng.randrange(self.num_groups)}"
            prefix = (PrefixPiece(group, shared),) if shared else ()
            requests.append(TraceRequest(now, input_length, output_length, prefix))
            now += rng.expovariate(1.0) / self.requests_per_second
        return requests


def _parts(name: str, text: str) -> list[tuple[str, float]]:
    """(key, value) of each part; the key of a plain number is ""."""
    parts = []
    for part in text.split(",", maxsplit=3):
        key, _, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 1 <= number <= MAX_TOKENS:
            raise ConfigError(f"{name}: {part[:40]!r}: must be from 1 to {MAX_TOKENS} tokens")
        parts.append((key.strip(), number))
    return parts
