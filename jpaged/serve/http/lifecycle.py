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
from jpaged.serve.engine.tokenizing import Tokenizing
from jpaged.serve.engine.tokenizing_process import TokenizingProcess, TokenizingSettings
from jpaged.serve.errors import say
from jpaged.serve.http.access import is_loopback
from jpaged.serve.http.app import make_app
from jpaged.serve.http.connections import NUM_SPARE, OUT_OF_FILES, Listener, bounded_by
from jpaged.serve.http.serving import Serving
from jpaged.serve.options import Flags, host_name

_KEEP_ALIVE = 75
"""Seconds for an idle connection: more than clients keep theirs, lest they use one just closed."""

_LONGEST_LINE = 1000
"""Characters of an error at the start."""

_OTHER_FILES = 128
"""Open files that are no connections."""

_SWITCH_INTERVAL = 2e-5
"""Seconds that a thread keeps the interpreter from the event loop each time, and the loop yields it
several times a token."""

_TICK = 0.5
"""Seconds between two looks at whether the engine's loop goes round."""

_LAST_WORDS = 5
"""Seconds for connections to close once there is nothing more to say."""


def run_server(flags: Flags) -> int:
    """Serve until a signal; gives the exit code."""
    try:
        sock = listen(flags.serve.host, flags.serve.port)
    except (OSError, ValueError) as error:  # ValueError: a host that is no name
        where = f"{flags.serve.host}:{flags.serve.port}"
        why = getattr(error, "strerror", None) or error
        say(f"cannot listen at {where} ({why}): use another --port or --host")
        return 1
    sys.setswitchinterval(_SWITCH_INTERVAL)
    with sock:
        return asyncio.run(_serve(flags, sock))


async def _serve(flags: Flags, sock: Listener) -> int:
    limits = flags.serve.limits
    most, num_spare = allow_connections(limits.max_connections)
    if num_spare == NUM_SPARE:  # files are not scarce
        sock.at_a_time = num_spare // 2
    limits = replace(limits, max_connections=most)
    hosts = hosts_served(flags, sock.getsockname()[0])
    serving = Serving(replace(flags.serve, limits=limits, allowed_hosts=hosts))
    http = HttpServer(_uvicorn_config(serving, num_spare))
    life = Life(serving, http)
    life.watch_signals()
    asyncio.get_running_loop().set_exception_handler(Complaints().hear)
    talking = asyncio.create_task(http.serve([sock]))
    await life.start(flags.engine, f"http://{_host(sock)}:{sock.getsockname()[1]}")
    await talking
    await life.end_engine()
    return life.exit_code


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: `Life` handles them."""
        yield


class Life:
    """Brings a server up, and down.

    Args:
        serving: Its state.
        http: What listens.

    Attributes:
        exit_code: 1 if there was no engine, or none any more, before a signal came.
    """

    def __init__(self, serving: Serving, http: HttpServer):
        self.exit_code = 0
        self._serving, self._http = serving, http
        self._process: EngineProcess | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, options: Mapping[str, Any], address: str) -> None:
        """Make an `Engine(**options)` and serve with it."""
        try:
            process = self._process = await EngineProcess.start(options)
            if self._ending is not None:  # it did not know of the process
                process.kill()
            await open_in_time(self._serving, process)
        except Exception as error:
            if self._ending is None:
                say(f"error: {await self._why(error)}")
                self._fail()
            return
        gc.freeze()  # what is there by now stays: to walk it takes longer than a step
        say(f"serving {self._serving.config.model_names[0]} at {address}")
        self._watching = asyncio.create_task(self._watch(process))

    async def end_engine(self) -> None:
        """End the engine's process, last of all."""
        if self._process is not None:
            await self._process.stop()

    async def _watch(self, process: EngineProcess) -> None:
        """Once an engine is gone, end the server, so that its supervisor starts another."""
        await watch_engine(process, self._serving.config.limits.hang_timeout)
        if self._ending is None:
            why = await self._why(RuntimeError(process.client.death))
            say(f"the engine is gone, no request can be served: {why}")
            self._fail()

    def _fail(self) -> None:
        """End the server with an error, after what is being answered."""
        self.exit_code = 1
        self._http.should_exit = True

    async def _why(self, error: Exception) -> str:
        """One line on an error, with what became of the engine's process."""
        known = isinstance(error, (RuntimeError, ValueError)) and str(error)
        words = str(error) if known else f"{type(error).__name__}: {error}"
        how = "" if self._process is None else await self._process.how_it_ended()
        return " ".join(words.split())[:_LONGEST_LINE] + how

    def watch_signals(self) -> None:
        """SIGTERM and Ctrl-C drain; the second one of either ends all at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._ending is not None:
            if self._process is not None:
                self._process.kill()
            os._exit(128 + number)
        say("shutting down: no new requests; a second signal ends those in flight at once")
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        serving = self._serving
        serving.stop_admitting()
        try:
            async with asyncio.timeout(serving.config.shutdown_timeout):
                while serving.num_requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            say(f"aborting {errors.counted(serving.num_requests, 'request')}")
            serving.engine.cut_all()
        self._http.should_exit = True
        if self._process is not None and not self._process.client.is_ready:
            self._process.kill()


@asynccontextmanager
async def serving_app(flags: Flags) -> AsyncIterator[tuple[ASGIApp, Serving]]:
    """The server's application with an engine of its own, for a program that listens itself.

    That program bounds connections and headers, says which Hosts are served, ends when the engine
    is gone (`Serving.engine.died`), and drains: it calls `Serving.stop_admitting` and waits until
    `num_requests` is 0. An engine that hangs is ended here (--hang-timeout). At the end of the
    block the engine ends, whatever runs.

    Raises:
        RuntimeError, ValueError: the engine could not be made in time, or has no tokenizer.
    """
    if "model" in flags.engine:
        await asyncio.to_thread(check_model, flags.engine["model"])
    serving = Serving(flags.serve)
    async with AsyncExitStack() as stack:
        process = await EngineProcess.start(flags.engine)
        stack.push_async_callback(process.stop)

        def text_process(settings: TokenizingSettings) -> TokenizingProcess:
            made = TokenizingProcess(settings)
            stack.callback(made.close)
            return made

        await open_in_time(serving, process, text_process)
        stack.callback(serving.tokenizing.close)
        watching = asyncio.create_task(watch_engine(process, flags.serve.limits.hang_timeout))
        stack.callback(watching.cancel)
        yield make_app(serving), serving


async def open_in_time(
    serving: Serving,
    process: EngineProcess,
    text_process: Callable[[TokenizingSettings], TokenizingProcess] = TokenizingProcess,
) -> None:
    """`start_serving`, but an engine that is not there after `--start-timeout` is ended: it may
    hang in a driver, or in NCCL.

    Raises:
        RuntimeError, ValueError: it was not there in time; or as `start_serving`.
    """
    limit = serving.config.limits.start_timeout
    try:
        async with asyncio.timeout(limit):
            await start_serving(serving, process.client, text_process)
    except TimeoutError as error:
        reason = f"the engine did not start within {limit:g} s (--start-timeout)"
        process.give_up(reason)
        raise RuntimeError(reason) from error


async def watch_engine(process: EngineProcess, patience: float) -> None:
    """Wait until an engine is gone; end it if its loop stands still for `patience` seconds. Those
    who wait for it then get errors.

    The seconds are counted in turns of this function: while this process is stopped none passes,
    since the engine may have been stopped with it.
    """
    client, still, seen = process.client, 0.0, process.client.seen
    while not await _comes(client.died, _TICK):
        still = still + _TICK if client.seen == seen else 0.0
        seen = client.seen
        if still >= patience:
            process.give_up(f"its loop stood still for {patience:g} s (--hang-timeout)")


async def start_serving(
    serving: Serving,
    client: EngineClient,
    text_process: Callable[[TokenizingSettings], TokenizingProcess] = TokenizingProcess,
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
    info = await client.ready()
    template, may_be_special = config.chat_template, config.allow_special_tokens
    process = text_process(TokenizingSettings(info.folder, template, may_be_special))
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, Path(info.folder))
        await asyncio.to_thread(process.wait_ready)
        texts = Tokenizing(tokenizer, process, info, config.limits.text_timeout)
        if config.chat_template is not None:
            await texts.check_template()
        if config.enable_auto_tool_choice:
            await texts.check_tools()
    except BaseException:
        process.close()  # or a thread would wait for it at the server's end
        raise
    serving.open(client, texts, info)


def _uvicorn_config(serving: Serving, num_spare: int) -> uvicorn.Config:
    log_requests = serving.config.log_requests
    return uvicorn.Config(
        make_app(serving),
        http=bounded_by(serving.config.limits, num_spare),
        ws="none",
        lifespan="off",
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_LAST_WORDS,
    )


def allow_connections(most: int) -> tuple[int, int]:
    """Let the process have a file for each connection, as far as the system permits.

    Returns:
        How many connections it permits, and how many more that only get a refusal.
    """
    needed = most + NUM_SPARE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return most, NUM_SPARE
    room = allowed - min(_OTHER_FILES, max(32, allowed // 4))
    num_spare = max(1, min(NUM_SPARE, room // 2))
    fewer = min(most, max(1, room - num_spare))
    if fewer < most:
        say(
            f"--max-connections is {fewer}, not {most}, since the system allows {hard} open files: "
            f"raise that (ulimit -n {needed}), or lower --max-connections"
        )
    return fewer, num_spare


def hosts_served(flags: Flags, address: str) -> tuple[str, ...] | None:
    """The names that requests may give as the Host, for a server that listens at `address`.

    Without keys and on the loopback alone, nothing but the Host tells this machine's users from a
    page of a stranger's, whose name has been made to lead here (DNS rebinding).

    Returns:
        Names in addition to this machine's own; None for any.
    """
    given = flags.serve.allowed_hosts
    if given is None and (flags.serve.api_keys or not is_loopback(address)):
        return None
    return (*(given or ()), host_name(flags.serve.host))


class Complaints:
    """Logs what asyncio reports; running out of files is logged once."""

    def __init__(self) -> None:
        self._is_said = False

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif not self._is_said:
            self._is_said = True
            say(
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


async def _comes(event: asyncio.Event, within: float) -> bool:
    """Wait for an event for so many seconds; whether it came."""
    try:
        await asyncio.wait_for(event.wait(), within)
    except TimeoutError:
        return False
    return True


def _host(sock: socket.socket) -> str:
    host = sock.getsockname()[0]
    return f"[{host}]" if ":" in host else host
