"""The server's life: start, serve, drain, end."""

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jpaged import Tokenizer, check_model, errors
from jpaged.serve.engine.client import EngineClient, EngineProcess
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
"""Seconds for an idle connection: more than clients keep theirs, lest they use one just closed."""

_MAX_ERROR_CHARACTERS = 1000
"""Characters of an error at the start."""

_NUM_OTHER_FILES = 128
"""Open files that are no connections."""

_SWITCH_INTERVAL_S = 2e-5
"""Seconds that a thread keeps the interpreter from the event loop each time, and the loop yields it
several times a token."""

_POLL_INTERVAL_S = 0.5
"""Seconds between two looks at whether the engine's loop goes round."""

_CLOSE_TIMEOUT_S = 5
"""Seconds for connections to close once there is nothing more to say."""


def run_server(flags: Flags) -> int:
    """Serve until a signal; gives the exit code."""
    try:
        sock = listen(flags.serve.host, flags.serve.port)
    except (OSError, ValueError) as error:  # ValueError: a host that is no name
        where = f"{flags.serve.host}:{flags.serve.port}"
        why = getattr(error, "strerror", None) or error
        log_line(f"cannot listen at {where} ({why}): use another --port or --host")
        return 1
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with sock:
        return asyncio.run(_serve(flags, sock))


async def _serve(flags: Flags, sock: Listener) -> int:
    limits = flags.serve.limits
    max_connections, num_spare = raise_file_limit(limits.max_connections)
    if num_spare == NUM_SPARE_CONNECTIONS:  # files are not scarce
        sock.accept_batch = num_spare // 2
    limits = replace(limits, max_connections=max_connections)
    hosts = served_hosts(flags, sock.getsockname()[0])
    serving = ServerState(replace(flags.serve, limits=limits, allowed_hosts=hosts))
    http = HttpServer(_uvicorn_config(serving, num_spare))
    lifecycle = Lifecycle(serving, http)
    lifecycle.watch_signals()
    asyncio.get_running_loop().set_exception_handler(LoopExceptionHandler().handle)
    serve_task = asyncio.create_task(http.serve([sock]))
    await lifecycle.start(flags.engine, f"http://{_url_host(sock)}:{sock.getsockname()[1]}")
    await serve_task
    await lifecycle.end_engine()
    return lifecycle.exit_code


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: `Lifecycle` handles them."""
        yield


class Lifecycle:
    """Brings a server up, and down.

    Args:
        serving: Its state.
        http: What listens.

    Attributes:
        exit_code: 1 if there was no engine, or none any more, before a signal came.
    """

    def __init__(self, serving: ServerState, http: HttpServer):
        self.exit_code = 0
        self._serving, self._http = serving, http
        self._process: EngineProcess | None = None
        self._shutdown_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self, options: Mapping[str, Any], address: str) -> None:
        """Make an `Engine(**options)` and serve with it."""
        try:
            process = self._process = await EngineProcess.start(options)
            if self._shutdown_task is not None:  # it did not know of the process
                process.kill()
            await start_with_timeout(self._serving, process)
        except Exception as error:
            if self._shutdown_task is None:
                log_line(f"error: {await self._describe_error(error)}")
                self._fail()
            return
        gc.freeze()  # what is there by now stays: to walk it takes longer than a step
        log_line(f"serving {self._serving.config.model_names[0]} at {address}")
        self._watch_task = asyncio.create_task(self._watch(process))

    async def end_engine(self) -> None:
        """End the engine's process, last of all."""
        if self._process is not None:
            await self._process.stop()

    async def _watch(self, process: EngineProcess) -> None:
        """Once an engine is gone, end the server, so that its supervisor starts another."""
        await watch_engine(process, self._serving.config.limits.hang_timeout)
        if self._shutdown_task is None:
            why = await self._describe_error(RuntimeError(process.client.close_reason))
            log_line(f"the engine is gone, no request can be served: {why}")
            self._fail()

    def _fail(self) -> None:
        """End the server with an error, after what is being answered."""
        self.exit_code = 1
        self._http.should_exit = True

    async def _describe_error(self, error: Exception) -> str:
        """One line on an error, with what became of the engine's process."""
        known = isinstance(error, (RuntimeError, ValueError)) and str(error)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        exit_text = "" if self._process is None else await self._process.exit_description()
        return " ".join(message.split())[:_MAX_ERROR_CHARACTERS] + exit_text

    def watch_signals(self) -> None:
        """SIGTERM and Ctrl-C drain; the second one of either ends all at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._shutdown_task is not None:
            if self._process is not None:
                self._process.kill()
            os._exit(128 + number)
        log_line("shutting down: no new requests; a second signal ends those in flight at once")
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
    """The server's application with an engine of its own, for a program that listens itself.

    That program bounds connections and headers, says which Hosts are served, ends when the engine
    is gone (`ServerState.engine.closed`), and drains: it calls `ServerState.stop_admitting` and waits until
    `num_requests` is 0. An engine that hangs is ended here (--hang-timeout). At the end of the
    block the engine ends, whatever runs.

    Raises:
        RuntimeError, ValueError: the engine could not be made in time, or has no tokenizer.
    """
    if "model" in flags.engine:
        await asyncio.to_thread(check_model, flags.engine["model"])
    serving = ServerState(flags.serve)
    async with AsyncExitStack() as stack:
        process = await EngineProcess.start(flags.engine)
        stack.push_async_callback(process.stop)

        def start_tokenizing(settings: TokenizingSettings) -> TokenizingProcess:
            made = TokenizingProcess(settings)
            stack.callback(made.close)
            return made

        await start_with_timeout(serving, process, start_tokenizing)
        stack.callback(serving.tokenizing.close)
        watch_task = asyncio.create_task(watch_engine(process, flags.serve.limits.hang_timeout))
        stack.callback(watch_task.cancel)
        yield make_app(serving), serving


async def start_with_timeout(
    serving: ServerState,
    process: EngineProcess,
    start_tokenizing: Callable[[TokenizingSettings], TokenizingProcess] = TokenizingProcess,
) -> None:
    """`start_serving`, but an engine that is not there after `--start-timeout` is ended: it may
    hang in a driver, or in NCCL.

    Raises:
        RuntimeError, ValueError: it was not there in time; or as `start_serving`.
    """
    limit = serving.config.limits.start_timeout
    try:
        async with asyncio.timeout(limit):
            await start_serving(serving, process.client, start_tokenizing)
    except TimeoutError as error:
        reason = f"the engine did not start within {limit:g} s (--start-timeout)"
        process.kill_and_close(reason)
        raise RuntimeError(reason) from error


async def watch_engine(process: EngineProcess, hang_timeout: float) -> None:
    """Wait until an engine is gone; end it if its loop stands still for `hang_timeout` seconds. Those
    who wait for it then get errors.

    The seconds are counted in turns of this function: while this process is stopped none passes,
    since the engine may have been stopped with it.
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
    """Serve with an engine, once it is made.

    Args:
        serving: The server's state.
        client: Speaks with the engine.
        text_process: Starts the process that tokenises.

    Raises:
        RuntimeError, ValueError: it could not be made, or has no tokenizer.
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
        process.close()  # or a thread would wait for it at the server's end
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


def raise_file_limit(max_connections: int) -> tuple[int, int]:
    """Let the process have a file for each connection, as far as the system permits.

    Returns:
        How many connections it permits, and how many more that only get a refusal.
    """
    needed = max_connections + NUM_SPARE_CONNECTIONS + _NUM_OTHER_FILES
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
            f"--max-connections is {num_allowed}, not {max_connections}, since the system allows {hard} open files: "
            f"raise that (ulimit -n {needed}), or lower --max-connections"
        )
    return num_allowed, num_spare


def served_hosts(flags: Flags, address: str) -> tuple[str, ...] | None:
    """The names that requests may give as the Host, for a server that listens at `address`.

    Without keys and on the loopback alone, nothing but the Host tells this machine's users from a
    page of a stranger's, whose name has been made to lead here (DNS rebinding).

    Returns:
        Names in addition to this machine's own; None for any.
    """
    configured_hosts = flags.serve.allowed_hosts
    if configured_hosts is None and (flags.serve.api_keys or not is_loopback(address)):
        return None
    return (*(configured_hosts or ()), normalize_host(flags.serve.host))


class LoopExceptionHandler:
    """Logs what asyncio reports; running out of files is logged once."""

    def __init__(self) -> None:
        self._has_logged = False

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`."""
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
    """A socket that listens there.

    Raises:
        OSError, ValueError: it cannot.
    """
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()  # an address in use is noticed only now
    except (OSError, ValueError):
        sock.close()
        raise
    return sock


async def _wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event for so many seconds; whether it came."""
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return False
    return True


def _url_host(sock: socket.socket) -> str:
    host = sock.getsockname()[0]
    return f"[{host}]" if ":" in host else host
