"""One server for most tests of this folder, with the real model in fp32, and its oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import Client, Server
from tests.server.reference import Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/server/" in str(item.path):
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    running = Server(
        log,
        *("--dtype", "fp32", "--max-seq-len", "2048", "--max-tokens-in-paged-kv-cache", "40000"),
    ).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> Client:
    return server.client


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(params=["inflight_llm", "ensemble"])
def door(request: pytest.FixtureRequest) -> str:
    """Both faces of the server keep the same contract."""
    return str(request.param)
