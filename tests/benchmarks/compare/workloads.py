"""The workloads: the same token ids for every system. Standard library only.

Prompts are random ids of plain text tokens. ``salt`` changes the ids, never the lengths: repeats
use other salts, so that no prefix cache serves one repeat from the one before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 100, 48_999
"""Ids outside are special tokens, or beyond the vocabulary of the embedded model."""

NAMES = ("W1", "W2c8", "W2c32", "W3", "W4", "W4off", "W5")


@dataclass(frozen=True)
class Job:
    """One request; it generates exactly ``max_tokens`` tokens, end ids ignored."""

    job_id: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    name: str
    jobs: tuple[Job, ...]
    """All of them arrive at once."""
    concurrency: int
    """Requests in flight at once; the others wait."""
    reuses_prefixes: bool = False
    """Systems serve it with their prefix cache on, all other workloads with it off."""
    shared_tokens: int = 0
    """Leading tokens that all prompts have in common."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def num_output_tokens(self) -> int:
        return sum(job.max_tokens for job in self.jobs)

    @property
    def longest_sequence(self) -> int:
        return max(len(job.prompt) + job.max_tokens for job in self.jobs)


def make_workload(name: str, salt: int) -> Workload:
    """The workload of that name, one of NAMES."""
    if name == "W1":
        return _uniform(name, 1, 128, 128, seed=1000 + salt)
    if name == "W2c8":
        return _uniform(name, 8, 128, 128, seed=2000 + salt)
    if name == "W2c32":
        return _uniform(name, 32, 128, 128, seed=2000 + salt)
    if name == "W3":
        return _mixed(name, salt)
    if name in ("W4", "W4off"):
        return _shared_prefix(name, salt)
    if name == "W5":
        return _uniform(name, 1, 2048, 1, seed=5000 + salt)
    raise ValueError(f"there is no workload {name}")


def warm_up_of(name: str) -> Workload:
    """What a system runs untimed before it is timed: other ids, and a shorter kind of W3 and W4."""
    shorter = {"W3": "W2c8", "W4": "W5", "W4off": "W5"}
    return make_workload(shorter.get(name, name), salt=99)


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_TOKEN, LAST_TOKEN + 1) for _ in range(count))


def _uniform(name: str, count: int, prompt: int, output: int, *, seed: int) -> Workload:
    draw = random.Random(seed)
    jobs = tuple(Job(place, _ids(draw, prompt), output) for place in range(count))
    return Workload(name, jobs, concurrency=count)


def _mixed(name: str, salt: int) -> Workload:
    """64 requests, 16 in flight: prompts of 16-512, 58 outputs of 8-64 and 6 of 256-384."""
    draw = random.Random(0)
    long = set(draw.sample(range(64), 6))
    jobs = []
    for place in range(64):
        num_prompt = draw.randint(16, 512)
        num_output = draw.randint(256, 384) if place in long else draw.randint(8, 64)
        jobs.append(Job(place, _ids(draw, num_prompt), num_output))
    if salt:
        draw = random.Random(3000 + salt)
        jobs = [Job(job.job_id, _ids(draw, len(job.prompt)), job.max_tokens) for job in jobs]
    return Workload(name, tuple(jobs), concurrency=16)


def _shared_prefix(name: str, salt: int) -> Workload:
    draw = random.Random(4000 + salt)
    prefix = _ids(draw, 1024)
    jobs = tuple(Job(place, prefix + _ids(draw, 32), 16) for place in range(32))
    return Workload(
        name, jobs, concurrency=32, reuses_prefixes=name == "W4", shared_tokens=len(prefix)
    )
