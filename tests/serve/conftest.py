"""Engines shared by the server's tests, and the census after each."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_helpers import SMALL, Scenario, Servers
from server_process import ServerProcess

from jpaged import Engine


@pytest.fixture
def engines(kept_engines: Callable[..., Engine]) -> Callable[..., Engine]:
    """Makes an engine, or gives one of these options that was made before."""
    return lambda **options: kept_engines(**{**SMALL, **options})


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines()


@pytest.fixture
def serve(engine: Engine) -> Callable[..., None]:
    """Runs a scenario, an async function of a `Server`, to its end; then all blocks are back."""

    def run(scenario: Scenario, own_engine: Engine | None = None, **config: Any) -> None:
        async def whole() -> None:
            servers = Servers()
            server = await servers.start(own_engine or engine, **config)
            try:
                await scenario(server)
            finally:
                await servers.end()

        asyncio.run(whole())

    return run


@pytest.fixture(scope="session")
def real_server(compilation_cache: Path) -> Iterator[ServerProcess]:
    """A server in a process of its own, shared by the tests that only ask."""
    server = ServerProcess(compilation_cache, "--dashboard-show-text")
    yield server
    server.end()
