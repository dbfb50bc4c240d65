"""Serve an engine of this process over HTTP.

The engine stays in the process of the caller, because a user's model and its arrays cannot move.
The HTTP server is a child process, so that HTTP work cannot hold the interpreter lock during a
step.
"""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from jpaged import Engine, processes
from jpaged.serve.engine.client import AttachedEngine
from jpaged.serve.engine.worker import EngineWorker
from jpaged.serve.http.lifecycle import run_server
from jpaged.serve.options import Flags, ServeConfig, make_serve_config

_EXIT_TIMEOUT_S = 10.0
"""Seconds for the HTTP process to end after the engine has stopped."""

_CODES_OF_SIGTERM = -signal.SIGTERM, 128 + signal.SIGTERM
"""Exit codes of an HTTP process that SIGTERM ended before its start, or a second time."""


def serve(engine: Engine, **options: Any) -> None:
    """Serve an engine until SIGTERM or Ctrl-C arrives. A second signal aborts requests in flight.

    Call the function in the thread that uses the engine. Afterwards, the engine can be used again.

    Args:
        engine: Engine with a tokenizer. At the end, its unfinished requests are aborted.
        **options: Options of `python -m jpaged.serve` for the server, with the names of
            `ServeConfig` and `Limits`, such as `host`, `port` and `api_keys`.

    Raises:
        TypeError, ValueError: An option is unknown or invalid, or the engine has no tokenizer.
        RuntimeError: The server could not start, or a step of the engine failed.
    """
    if engine.tokenizer_folder is None:
        raise ValueError("the engine has no tokenizer: pass tokenizer=... to Engine")
    config = make_serve_config(options)
    child = processes.Child("jpaged.serve.http.attached", is_group_leader=True)
    try:
        processes.send(child.sock, json.dumps(asdict(config)).encode())
        with _forward_signals(child.process) as forwarded:
            EngineWorker(engine, processes.MessageSocket(child.sock)).run()
            code = child.exit_code(_EXIT_TIMEOUT_S)
    finally:
        child.kill_and_close()
    if code and not (forwarded and code in _CODES_OF_SIGTERM):
        why = processes.describe_exit(code)
        raise RuntimeError(f"the HTTP server ended ({why}): its log says why")


@contextmanager
def _forward_signals(process: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """In the `with` block, forward SIGTERM and SIGINT to another process, both as SIGTERM.

    Python handles signals only in the main thread, so other threads forward nothing.

    Yields:
        The signals that have arrived.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return

    def forward(number: int, frame: object) -> None:
        arrived.append(number)
        process.send_signal(signal.SIGTERM)

    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, forward) for number in numbers]
    try:
        yield arrived
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main(sock: socket.socket) -> int:
    """Run the HTTP server for the engine of the parent process, and return the exit code.

    Args:
        sock: Channel to the parent, which first sends the options.
    """
    message = processes.receive(sock)
    if message is None:
        return 1
    config = _read_config(json.loads(message))
    return run_server(Flags({}, config), lambda: AttachedEngine.attach(sock))


def _read_config(fields: Mapping[str, Any]) -> ServeConfig:
    """Return the options that the parent sent as JSON. Lists become tuples again."""
    given = {**fields, **fields["limits"]}
    del given["limits"]
    return make_serve_config(
        {name: tuple(it) if isinstance(it, list) else it for name, it in given.items()}
    )
