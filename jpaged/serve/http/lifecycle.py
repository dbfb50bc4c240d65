"""Lifecycle of the server: start the engine, serve, drain on a signal, and exit."""

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from jpaged import Tokenizer, check_model, errors
from jpaged.serve.engine.client import AttachedEngine, EngineClient, EngineProcess
from jpaged.serve.engine.tokenizing import TokenizingService
from jpaged.serve.engine.tokenizing_process import TokenizingProcess, TokenizingSettings
from jpaged.serve.errors import log_line
from jpaged.serve.http.access import is_loopback
from jpaged.serve.http.app import make_app
from jpaged.serve.http.connections import (
    NUM_SPARE_CONNECTIONS,
    OUT_OF_FILES_ERRNOS,
    Listener,
    make_bounded_protocol,
)
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import Flags, normalize_host

_KEEP_ALIVE_S = 75
"""Seconds before an idle connection is closed.

Clients close idle connections earlier, so they never send a request on one that is just closing.
"""

_MAX_ERROR_CHARACTERS = 1000
"""Maximum number of characters of a logged error of the engine."""

_NUM_OTHER_FILES = 128
"""Number of file descriptors that are reserved for other uses than connections."""

_SWITCH_INTERVAL_S = 2e-5
"""Seconds after which a thread must give the interpreter lock back to the event loop.

The event loop gives up the lock several times per token, so the default of 5 ms is too long.
"""

_POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the engine's heartbeat."""

_CLOSE_TIMEOUT_S = 5
"""Seconds for connections to close after the last response."""


RunningEngine = EngineProcess | AttachedEngine
"""An engine that the server can use."""


def run_server(
    flags: Flags, start_engine: Callable[[], Awaitable[RunningEngine]] | None = None
) -> int:
    """Serve until a signal arrives or the engine has ended, and return the exit code.

    Args:
        flags: Options of the engine and of the server.
        start_engine: Function that connects to an engine; None to start `Engine(**flags.engine)`.
    """
    try:
        sock = listen(flags.serve.host, flags.serve.port)
    except (OSError, ValueError) as error:  # an invalid host name raises ValueError
        where = f"{flags.serve.host}:{flags.serve.port}"
        why = getattr(error, "strerror", None) or error
        log_line(f"cannot listen at {where} ({why}): use another --port or --host")
        return 1
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with sock:
        start = start_engine or partial(EngineProcess.start, flags.engine)
        return asyncio.run(_serve(flags, sock, start))


async def _serve(
    flags: Flags, sock: Listener, start_engine: Callable[[], Awaitable[RunningEngine]]
) -> int:
    limits = flags.serve.limits
    max_connections, num_spare = raise_file_limit(limits.max_connections)
    if num_spare == NUM_SPARE_CONNECTIONS:  # the system allows enough files
        sock.accept_batch = num_spare // 2
    limits = replace(limits, max_connections=max_connections)
    hosts = served_hosts(flags, sock.getsockname()[0])
    serving = ServerState(replace(flags.serve, limits=limits, allowed_hosts=hosts))
    http = HttpServer(_uvicorn_config(serving, num_spare))
    lifecycle = Lifecycle(serving, http)
    lifecycle.watch_signals()
    asyncio.get_running_loop().set_exception_handler(LoopExceptionHandler().handle)
    serve_task = asyncio.create_task(http.serve([sock]))
    await lifecycle.start(start_engine, f"http://{_url_host(sock)}:{sock.getsockname()[1]}")
    await serve_task
    await lifecycle.end_engine()
    return lifecycle.exit_code


class HttpServer(uvicorn.Server):
    """uvicorn server that does not handle signals."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `Lifecycle` handles signals


class Lifecycle:
    """Starts the engine, watches it, and shuts the server down.

    Args:
        serving: State of the server.
        http: HTTP server, which is already listening.

    Attributes:
        exit_code: Exit code of the process: 1 if the engine failed before a signal arrived,
            otherwise 0.
    """

    def __init__(self, serving: ServerState, http: HttpServer):
        self.exit_code = 0
        self._serving, self._http = serving, http
        self._process: RunningEngine | None = None
        self._shutdown_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def start(
        self, start_engine: Callable[[], Awaitable[RunningEngine]], address: str
    ) -> None:
        """Start or connect to an engine, and serve requests with it."""
        try:
            process = self._process = await start_engine()
            if self._shutdown_task is not None:  # a signal arrived before the engine was started
                process.kill()
            await start_with_timeout(self._serving, process)
        except Exception as error:
            if self._shutdown_task is None:
                log_line(f"error: {await self._describe_error(error)}")
                self._fail()
            return
        # Exclude startup objects from garbage collections, which would take longer than a step.
        gc.freeze()
        log_line(f"serving {self._serving.config.model_names[0]} at {address}")
        self._watch_task = asyncio.create_task(self._watch(process))

    async def end_engine(self) -> None:
        """Stop the engine's process."""
        if self._process is not None:
            await self._process.stop()

    async def _watch(self, process: RunningEngine) -> None:
        """Shut down when the engine has ended, so that a supervisor can restart the server."""
        await watch_engine(process, self._serving.config.limits.hang_timeout)
        if self._shutdown_task is None:
            why = await self._describe_error(RuntimeError(process.client.close_reason))
            log_line(f"the engine is gone, so the server exits: {why}")
            self._fail()

    def _fail(self) -> None:
        """Exit with code 1 after the current responses."""
        self.exit_code = 1
        self._http.should_exit = True

    async def _describe_error(self, error: Exception) -> str:
        """Return one line with the error's text and the exit status of the engine's process."""
        known = isinstance(error, (RuntimeError, ValueError)) and str(error)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        exit_text = "" if self._process is None else await self._process.exit_description()
        return " ".join(message.split())[:_MAX_ERROR_CHARACTERS] + exit_text

    def watch_signals(self) -> None:
        """Drain the server on SIGTERM or SIGINT; a second signal ends the process immediately."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._shutdown_task is not None:
            if self._process is not None:
                self._process.kill()
            os._exit(128 + number)
        log_line("shutting down: no new requests; a second signal aborts requests in flight")
        self._shutdown_task = asyncio.create_task(self._shut_down())

    async def _shut_down(self) -> None:
        serving = self._serving
        serving.stop_admitting()
        try:
            async with asyncio.timeout(serving.config.shutdown_timeout):
                while serving.num_requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log_line(f"aborting {errors.format_count(serving.num_requests, 'request')}")
            serving.engine.abort_all()
        self._http.should_exit = True
        if self._process is not None and not self._process.client.is_ready:
            self._process.kill()


@asynccontextmanager
async def serving_app(flags: Flags) -> AsyncIterator[tuple[ASGIApp, ServerState]]:
    """Start an engine and yield the server's application, for a program with its own HTTP server.

    The program has these duties:

    - limit connections and headers, and set the allowed hosts;
    - exit when the engine has ended (`ServerState.engine.closed`);
    - to drain, call `ServerState.stop_admitting` and wait until `num_requests` is 0.

    An engine that hangs for `--hang-timeout` is killed. The engine stops at the end of the `with`
    block, even if requests are in flight.

    Raises:
        RuntimeError, ValueError: The engine did not start in time, or has no tokenizer.
    """
    if "model" in flags.engine:
        await asyncio.to_thread(check_model, flags.engine["model"])
    serving = ServerState(flags.serve)
    async with AsyncExitStack() as stack:
        process = await EngineProcess.start(flags.engine)
        stack.push_async_callback(process.stop)

        def start_tokenizing(settings: TokenizingSettings) -> TokenizingProcess:
            tokenizing_process = TokenizingProcess(settings)
            stack.callback(tokenizing_process.close)
            return tokenizing_process

        await start_with_timeout(serving, process, start_tokenizing)
        stack.callback(serving.tokenizing.close)
        watch_task = asyncio.create_task(watch_engine(process, flags.serve.limits.hang_timeout))
        stack.callback(watch_task.cancel)
        yield make_app(serving), serving


async def start_with_timeout(
    serving: ServerState,
    process: RunningEngine,
    start_tokenizing: Callable[[TokenizingSettings], TokenizingProcess] = TokenizingProcess,
) -> None:
    """Call `start_serving`, and kill an engine that has not started after `--start-timeout`.

    An engine can hang in a driver or in NCCL.

    Raises:
        RuntimeError, ValueError: The engine did not start in time, or `start_serving` failed.
    """
    limit = serving.config.limits.start_timeout
    try:
        async with asyncio.timeout(limit):
            await start_serving(serving, process.client, start_tokenizing)
    except TimeoutError as error:
        reason = f"the engine did not start within {limit:g} s (--start-timeout)"
        process.kill_and_close(reason)
        raise RuntimeError(reason) from error


async def watch_engine(process: RunningEngine, hang_timeout: float) -> None:
    """Wait until an engine has ended; kill it if its loop stalls for `hang_timeout` seconds.

    Requests of a killed engine end with errors. This function counts its polls instead of reading a
    clock. While this process is suspended, the engine may be suspended too, and this time must not
    count.
    """
    client, stalled_s, last_heartbeat = process.client, 0.0, process.client.last_heartbeat
    while not await _wait_for_event(client.closed, _POLL_INTERVAL_S):
        stalled_s = stalled_s + _POLL_INTERVAL_S if client.last_heartbeat == last_heartbeat else 0.0
        last_heartbeat = client.last_heartbeat
        if stalled_s >= hang_timeout:
            process.kill_and_close(f"its loop stood still for {hang_timeout:g} s (--hang-timeout)")


async def start_serving(
    serving: ServerState,
    client: EngineClient,
    start_tokenizing: Callable[[TokenizingSettings], TokenizingProcess] = TokenizingProcess,
) -> None:
    """Wait until an engine is ready, start tokenizing, and begin to serve.

    Args:
        serving: State of the server.
        client: Client of the engine's process.
        start_tokenizing: Starts the tokenizing process.

    Raises:
        RuntimeError, ValueError: The engine did not start, or has no tokenizer.
    """
    config = serving.config
    info = await client.wait_ready()
    template, may_be_special = config.chat_template, config.allow_special_tokens
    process = start_tokenizing(TokenizingSettings(info.folder, template, may_be_special))
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, Path(info.folder))
        await asyncio.to_thread(process.wait_ready)
        tokenizing = TokenizingService(tokenizer, process, info, config.limits.text_timeout)
        if config.chat_template is not None:
            await tokenizing.check_template()
        if config.enable_auto_tool_choice:
            await tokenizing.check_tools()
    except BaseException:
        # Close the process. Otherwise, Python could not exit, because the thread of `wait_ready`
        # would wait for the process.
        process.close()
        raise
    serving.open(client, tokenizing, info)


def _uvicorn_config(serving: ServerState, num_spare: int) -> uvicorn.Config:
    log_requests = serving.config.log_requests
    return uvicorn.Config(
        make_app(serving),
        http=make_bounded_protocol(serving.config.limits, num_spare),
        ws="none",
        lifespan="off",
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


def num_files_needed(max_connections: int) -> int:
    """Return the limit of open files that the server needs for its connections."""
    return max_connections + NUM_SPARE_CONNECTIONS + _NUM_OTHER_FILES


def raise_file_limit(max_connections: int) -> tuple[int, int]:
    """Raise the process's limit of open files to what the connections need, if possible.

    Returns:
        Two numbers: the maximum number of connections, and the number of further connections on
        which health checks are answered and all other requests refused.
    """
    needed = num_files_needed(max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return max_connections, NUM_SPARE_CONNECTIONS
    num_free_files = allowed - min(_NUM_OTHER_FILES, max(32, allowed // 4))
    num_spare = max(1, min(NUM_SPARE_CONNECTIONS, num_free_files // 2))
    num_allowed = min(max_connections, max(1, num_free_files - num_spare))
    if num_allowed < max_connections:
        log_line(
            f"--max-connections is {num_allowed}, not {max_connections}, because the system allows "
            f"{hard} open files: raise the limit (ulimit -n {needed}), or lower --max-connections"
        )
    return num_allowed, num_spare


def served_hosts(flags: Flags, address: str) -> tuple[str, ...] | None:
    """Return the host names that requests may have as the Host, if the server listens at `address`.

    A server on a loopback address without keys must check the Host: otherwise, a malicious website
    could reach the server by DNS rebinding.

    Returns:
        Host names in addition to localhost and loopback addresses; None allows every host.
    """
    configured_hosts = flags.serve.allowed_hosts
    if configured_hosts is None and (flags.serve.api_keys or not is_loopback(address)):
        return None
    return (*(configured_hosts or ()), normalize_host(flags.serve.host))


class LoopExceptionHandler:
    """Logs errors of the event loop. The error that no more files can be opened is logged once."""

    def __init__(self) -> None:
        self._has_logged = False

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop; see `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_FILES_ERRNOS:
            loop.default_exception_handler(context)
        elif not self._has_logged:
            self._has_logged = True
            log_line(
                f"new connections wait until others are closed ({error.strerror}): raise "
                "ulimit -n, or lower --max-connections"
            )


def listen(host: str, port: int) -> Listener:
    """Return a socket that listens at `host` and `port`.

    Raises:
        OSError, ValueError: The socket cannot listen at this address.
    """
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()  # `listen` raises an error if the address is in use
    except (OSError, ValueError):
        sock.close()
        raise
    return sock


async def _wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait at most `timeout` seconds for an event, and return whether the event was set."""
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return False
    return True


def _url_host(sock: socket.socket) -> str:
    host = sock.getsockname()[0]
    return f"[{host}]" if ":" in host else host
