"""Our events in a router that others wrote: NVIDIA Dynamo's, in a Python of its own.

``DYNAMO_PYTHON`` names an interpreter that has the packages ai-dynamo-runtime and ai-dynamo (the
second installed without its dependencies). They do not fit into the environment of the engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.api import KvTiersConfig, Request
from inflight.api.kv_events import KvEventFormat, KvEventsConfig
from inflight.executor import Executor
from tests.fakes.arithmetic_runner import ArithmeticRunner
from tests.fakes.executors import make_executor

BLOCK = 16
PROMPT = list(range(1, 4 * BLOCK + 1))
_HERE = sys.executable if importlib.util.find_spec("dynamo") else ""
PYTHON = os.environ.get("DYNAMO_PYTHON", _HERE)

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="DYNAMO_PYTHON names no interpreter that has NVIDIA Dynamo"
)


class Router:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def blocks(self, token_ids: list[int]) -> list[int]:
        """[on the device, host memory counted in] of the blocks of a prompt."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(token_ids) + "\n")
        stdin.flush()
        found: list[int] = json.loads(stdout.readline())
        return found

    def comes_to(
        self, token_ids: list[int], wanted: list[int], nudge: Callable[[], object]
    ) -> bool:
        """Whether it believes so soon. ``nudge`` makes a message: Dynamo sees only then that it has
        missed some, and asks for them."""
        deadline = time.monotonic() + 15
        while self.blocks(token_ids) != wanted:
            if time.monotonic() > deadline:
                return False
            nudge()
            time.sleep(0.05)
        return True


@contextmanager
def router(config: KvEventsConfig) -> Iterator[Router]:
    program = str(Path(__file__).with_name("dynamo_router.py"))
    arguments = [str(BLOCK), config.endpoint, config.replay_endpoint]
    with subprocess.Popen(
        [PYTHON, program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"DYN_LOG": "off"},
    ) as process:
        try:
            yield Router(process)
        finally:
            process.kill()


@pytest.fixture(params=KvEventFormat, ids=lambda each: each.value)
def config(request: pytest.FixtureRequest) -> KvEventsConfig:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    return KvEventsConfig(
        endpoint=f"tcp://127.0.0.1:{ports[0]}",
        replay_endpoint=f"tcp://127.0.0.1:{ports[1]}",
        event_format=request.param,
    )


def answer(executor: Executor, prompt: list[int]) -> None:
    request_id = executor.enqueue_request(Request(input_token_ids=prompt, max_tokens=2))
    while not any(r.is_final for r in executor.await_responses(request_id, 10.0)):
        pass


def test_the_router_knows_what_an_engine_has_cached_until_it_stops(config: KvEventsConfig) -> None:
    """It joins late, finds the gap in the numbers, and asks for what it has missed."""
    with make_executor(
        kv_events_config=config, tokens_per_block=BLOCK, max_num_tokens=64
    ) as executor:
        other = iter(range(100, 900))
        answer(executor, PROMPT)
        with router(config) as dynamo:
            assert dynamo.comes_to(PROMPT, [4, 4], lambda: answer(executor, [next(other)] * BLOCK))
            assert dynamo.blocks([*PROMPT[: 2 * BLOCK], 7, *PROMPT[2 * BLOCK :]])[0] == 2
            executor.shutdown()
            assert dynamo.comes_to(PROMPT, [0, 0], lambda: None)


def test_the_router_follows_blocks_into_a_lower_tier_and_out_of_it(config: KvEventsConfig) -> None:
    block_bytes = BLOCK * ArithmeticRunner().spec.kv_bytes_per_token
    with make_executor(
        kv_events_config=config,
        tokens_per_block=BLOCK,
        tiers=KvTiersConfig(host_memory_bytes=8 * block_bytes),
        num_blocks=8,
        max_num_tokens=64,
        max_seq_len=8 * BLOCK,
    ) as executor:
        other = iter(range(100, 900))

        def answer_another(num_blocks: int) -> None:
            answer(executor, [next(other)] * BLOCK * num_blocks)

        def nudge() -> None:
            answer_another(1)
            answer(executor, PROMPT)  # it is not the one to be evicted

        answer(executor, PROMPT)
        with router(config) as dynamo:
            assert dynamo.comes_to(PROMPT, [4, 4], nudge)
            answer_another(7)  # the whole pool
            assert dynamo.comes_to(PROMPT, [0, 4], lambda: None)
            answer_another(7)
            answer_another(7)  # and host memory
            assert dynamo.comes_to(PROMPT, [0, 0], lambda: None)


def test_a_window_that_loses_blocks_takes_nothing_from_the_router(config: KvEventsConfig) -> None:
    """It is told of both pools and counts the blocks of full attention."""
    with make_executor(
        ArithmeticRunner(windows=(None, 2 * BLOCK)),
        kv_events_config=replace(config, all_pools=True),
        tokens_per_block=BLOCK,
        max_num_tokens=64,
        num_blocks=40,
    ) as executor:
        other = iter(range(100, 900))
        answer(executor, PROMPT)
        with router(config) as dynamo:
            assert dynamo.comes_to(PROMPT, [4, 4], lambda: answer(executor, [next(other)] * BLOCK))
            first, window = executor._engine.kv.pools
            while not window.stats().evicted_blocks:
                answer(executor, [next(other)] * BLOCK)
            assert not first.stats().evicted_blocks
            new = [next(other)] * BLOCK
            answer(executor, new)
            assert dynamo.comes_to(new, [1, 1], lambda: answer(executor, [next(other)] * BLOCK))
            assert dynamo.blocks(PROMPT) == [4, 4]
