"""Share engines between the server tests, and check after each test that all blocks are free."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from serve_helpers import SMALL, Scenario, Servers
from server_process import ServerProcess
from test_tools import HERMES

from jpaged import Engine


@pytest.fixture
def engines(kept_engines: Callable[..., Engine]) -> Callable[..., Engine]:
    """Return a function that returns an engine with the given options, reusing earlier engines."""
    return lambda **options: kept_engines(**{**SMALL, **options})


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines()


@pytest.fixture
def serve(engine: Engine) -> Callable[..., None]:
    """Return a function that runs a scenario and then checks that all blocks are free."""

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


@pytest.fixture
def scripted(engine: Engine) -> ScriptedEngine:
    """Return an engine whose answers a test chooses."""
    return ScriptedEngine(engine)


@pytest.fixture
def serve_scripted(serve: Callable[..., None], scripted: ScriptedEngine) -> Callable[..., None]:
    """Return a function that runs a scenario on a server with the scripted engine.

    The server parses tool calls and reasoning.
    """

    def run(scenario: Scenario, **config: Any) -> None:
        serve(scenario, scripted, **{**HERMES, "reasoning_parser": "qwen3", **config})

    return run


@pytest.fixture(scope="session")
def real_server(compilation_cache: Path) -> Iterator[ServerProcess]:
    """Run a server in a separate process, shared by tests that only send requests."""
    server = ServerProcess(compilation_cache, "--dashboard-show-text")
    yield server
    server.end()
