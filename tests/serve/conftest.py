"""Engines shared by the server's tests, and the census after each."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_helpers import SMALL, Scenario, Servers
from server_process import ServerProcess

from jpaged import Engine


@pytest.fixture(scope="session")
def all_engines() -> dict[tuple, Engine]:
    return {}


@pytest.fixture
def engines(all_engines: dict[tuple, Engine], compilation_cache: Path) -> Callable[..., Engine]:
    """Makes an engine, or gives one of these options that was made before."""

    def make(**options: Any) -> Engine:
        options = {**SMALL, **options}
        key = tuple(sorted(options.items()))
        if key not in all_engines:
            all_engines[key] = Engine(**options, compilation_cache_dir=compilation_cache)
        return all_engines[key]

    return make


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
    server = ServerProcess(compilation_cache)
    yield server
    server.end()
