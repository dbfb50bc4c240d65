"""The engine process: runs commands of the HTTP process, runs steps, and reports new tokens.

The engine runs in a separate process, so that HTTP work cannot hold the interpreter lock during a
step. The engine process sends one update per step with the new tokens of all requests. The
log-probabilities of a long prompt are sent in chunks, one per update.

While the HTTP process does not read, steps continue. The engine then collects the new tokens of
each request in one delta.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jpaged import Engine, RequestDelta, processes
from jpaged.errors import ErrorInfo, ErrorKind, error_info
from jpaged.serve.dashboard.sampler import PoolSampler
from jpaged.serve.engine.messages import (
    AbortRequests,
    Command,
    ControlEngine,
    ControlResult,
    EngineFailed,
    EngineInfo,
    EngineRequest,
    EngineUpdate,
    FetchPoolDiffs,
    Report,
    RequestRefused,
    StartEngine,
    StopEngine,
    decode_command,
    encode,
)
from jpaged.serve.errors import log_line

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two updates of an idle engine."""

LOGPROBS_CHUNK_SIZE = 512
"""Maximum number of prompt tokens whose log-probabilities are sent in one delta."""

_STATS_INTERVAL_S = 0.2

_MAX_COMMANDS_TIME_S = 0.005
"""Maximum seconds that a step waits for commands. The last command may exceed the limit."""

_PARENT_CHECK_INTERVAL_S = 1.0


class EngineWorker:
    """Runs an engine on the commands that arrive over a channel.

    Args:
        engine: The engine.
        link: Channel to the HTTP process.
    """

    def __init__(self, engine: Engine, link: processes.MessageSocket):
        self._engine = engine
        self._link = link
        self._sampler = PoolSampler(engine)
        self._is_stopped = False
        self._stats_due = 0.0
        # Unsent deltas, by request id, of requests whose prompt log-probabilities are sent in
        # chunks.
        self._chunks_by_request: dict[str, deque[RequestDelta]] = {}
        # A pause with mode="wait" begins when all requests have finished. Until then, new requests
        # and control commands are held.
        self._pending_pause: ControlEngine | None = None
        self._held_commands: list[EngineRequest | ControlEngine] = []

    def run(self) -> None:
        """Run commands and steps until `StopEngine` arrives or the channel closes.

        At the end, abort all requests and close the channel.

        Raises:
            RuntimeError: A step failed. `EngineFailed` has been sent.
        """
        self._send(_engine_info(self._engine))
        try:
            while not self._is_stopped:
                self._run_iteration()
        except EOFError:
            pass
        except Exception as error:
            self._send(EngineFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._engine.abort_all()
            self._link.close()

    def _run_iteration(self) -> None:
        self._handle_commands()
        if self._is_busy:
            self._engine.advance()
            self._sampler.after_step()
        if self._pending_pause is not None and not self._engine.has_work:
            self._begin_pending_pause(self._pending_pause)
        if self._link.is_flushed:
            self._send_update()

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has steps to run, and can run them."""
        return self._engine.has_work and self._engine.can_advance

    def _send(self, report: Report) -> None:
        self._link.send(encode(report))

    def _receive(self, timeout: float) -> Command | None:
        message = self._link.receive(timeout)
        return None if message is None else decode_command(message)

    def _handle_commands(self) -> None:
        """Run the received commands.

        If the engine has steps to run, stop after `_MAX_COMMANDS_TIME_S`. The remaining commands
        run after the next step.
        """
        is_busy = self._is_busy
        can_send = self._chunks_by_request and self._link.is_flushed
        command = self._receive(0.0 if is_busy or can_send else HEARTBEAT_INTERVAL_S)
        deadline = time.monotonic() + _MAX_COMMANDS_TIME_S
        while command is not None:
            self._handle_command(command)
            if self._is_stopped or (is_busy and time.monotonic() > deadline):
                break
            command = self._receive(0.0)

    def _send_update(self) -> None:
        deltas, now = self._engine.take_deltas(), time.monotonic()
        for delta in deltas:
            # Log the error here, because the client may get only a reference to the log.
            if delta.error is not None:
                log_line(f"{delta.request_id}: {delta.error}")
        deltas = self._split_deltas(deltas)
        is_idle = not self._is_busy
        stats = None
        if is_idle or now >= self._stats_due:
            stats, self._stats_due = self._engine.stats(), now + _STATS_INTERVAL_S
        if deltas or stats is not None:
            self._send(EngineUpdate(deltas, stats))

    def _split_deltas(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Return the deltas to send now.

        Long prompt log-probabilities are split into chunks. One call returns one chunk of one
        request, and the requests take turns. The deltas of each request stay in order.
        """
        to_send = []
        for delta in deltas:
            if (
                len(delta.prompt_logprobs or ()) > LOGPROBS_CHUNK_SIZE
                or delta.request_id in self._chunks_by_request
            ):
                self._chunks_by_request.setdefault(delta.request_id, deque()).extend(
                    _split_delta(delta)
                )
            else:
                to_send.append(delta)
        if self._chunks_by_request:
            request_id = next(iter(self._chunks_by_request))
            chunks = self._chunks_by_request.pop(request_id)
            to_send.append(chunks.popleft())
            # Also send the request's following deltas, up to the next delta with prompt
            # log-probabilities. Deltas without prompt log-probabilities are small.
            while chunks and not chunks[0].prompt_logprobs:
                to_send.append(chunks.popleft())
            if chunks:  # put this request at the end, so that requests take turns
                self._chunks_by_request[request_id] = chunks
        return to_send

    def _handle_command(self, command: Command) -> None:
        match command:
            case EngineRequest() | ControlEngine() if self._must_hold(command):
                self._held_commands.append(command)
            case EngineRequest():
                self._add_request(command)
            case ControlEngine():
                self._control(command)
            case AbortRequests():
                self._held_commands = [
                    it
                    for it in self._held_commands
                    if not (isinstance(it, EngineRequest) and it.request_id in command.request_ids)
                ]
                for request_id in command.request_ids:
                    self._chunks_by_request.pop(request_id, None)
                    self._engine.abort(request_id)
            case FetchPoolDiffs():
                self._send(self._sampler.fetch(command.snapshot, command.tokens))
            case StopEngine():
                self._is_stopped = True

    def _must_hold(self, command: EngineRequest | ControlEngine) -> bool:
        """Return whether the command must wait until the engine has paused."""
        asks_state = isinstance(command, ControlEngine) and command.action == "state"
        return self._pending_pause is not None and not asks_state

    def _control(self, command: ControlEngine) -> None:
        """Carry out a command and report its result. A pause with mode="wait" begins later."""
        engine, arguments, error = self._engine, dict(command.arguments), None
        folder = arguments.pop("path", None)
        is_wait = command.action == "pause" and arguments.get("mode") == "wait"
        # With mode="wait", call `Engine.pause` only when all requests have ended. There are two
        # exceptions, in which `Engine.pause` is called immediately. First, an engine that cannot
        # run steps would never end its requests: `Engine.pause` raises an error if requests are
        # unfinished. Second, `Engine.pause` raises an error for mode="wait" with `recompute`.
        if is_wait and engine.can_advance and not arguments.get("recompute"):
            self._pending_pause = command
            return
        try:
            if command.action == "update_weights":
                engine.update_weights(Path(folder), **arguments)
            elif command.action != "state":
                getattr(engine, command.action)(**arguments)
        except (TypeError, ValueError, RuntimeError, OSError) as problem:
            log_line(f"{command.action}: {problem}")
            text = str(problem)
            if folder is not None:  # do not show the client where the server keeps its files
                text = text.replace(folder, Path(folder).name)
            error = error_info(ValueError(text))
        self._send(
            ControlResult(
                command.control_id,
                engine.is_paused,
                engine.is_sleeping,
                engine.weights_version,
                error,
            )
        )
        if error is not None:
            engine.check_alive()

    def _begin_pending_pause(self, command: ControlEngine) -> None:
        """Pause the engine now that all requests have finished, and run the held commands."""
        self._pending_pause = None
        arguments = {**command.arguments, "mode": "keep"}
        self._control(ControlEngine(command.control_id, "pause", arguments))
        held, self._held_commands = self._held_commands, []
        for each in held:
            self._handle_command(each)

    def _add_request(self, request: EngineRequest) -> None:
        name, ids, salt = request.request_id, request.prompt_token_ids, request.cache_salt
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        try:
            self._engine.add_request(
                prompt, request.params, request_id=name, priority=request.priority
            )
        except (TypeError, ValueError) as error:
            self._send(RequestRefused(name, error_info(error)))
        # Fail only this request; if the engine itself is broken, `advance` will raise an error.
        except Exception as error:
            log_line(f"{name}: {error!r}")
            info = ErrorInfo("", ("the request failed",), kind=ErrorKind.INTERNAL)
            self._send(RequestRefused(name, info))


def _split_delta(delta: RequestDelta) -> Iterator[RequestDelta]:
    """Yield a delta as several deltas, each with a chunk of the prompt log-probabilities.

    The last of these deltas has all other fields too.
    """
    scores = delta.prompt_logprobs
    while scores is not None and len(scores) > LOGPROBS_CHUNK_SIZE:
        cached = delta.num_cached_tokens
        chunk = scores[:LOGPROBS_CHUNK_SIZE]
        yield RequestDelta(delta.request_id, [], prompt_logprobs=chunk, num_cached_tokens=cached)
        scores = scores[LOGPROBS_CHUNK_SIZE:]
    yield replace(delta, prompt_logprobs=scores)


def _engine_info(engine: Engine) -> EngineInfo:
    config = engine.runtime_config
    return EngineInfo(
        folder=str(engine.tokenizer_folder),
        vocab_size=engine.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        cache_dtype=engine.config.kv_cache_dtype,
    )


def describe_start_error(error: Exception) -> str:
    """Return a text that says why the engine could not be started."""
    message = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message:
        remedy = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs"
        return f"not enough device memory: {remedy} ({message})"
    if not (message and isinstance(error, (ValueError, RuntimeError, OSError))):
        traceback.print_exception(error, file=sys.stderr)
        return f"{type(error).__name__}: {message}"
    return message


def _receive_options(link: processes.MessageSocket) -> dict[str, Any]:
    while True:
        message = link.receive(HEARTBEAT_INTERVAL_S)
        if message is not None and isinstance(command := decode_command(message), StartEngine):
            return command.options


def _exit_with_parent(parent: int) -> None:
    """Wait until the parent process has ended, then exit immediately."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_INTERVAL_S)
    os._exit(1)


def main(sock: socket.socket, parent: str) -> int:
    """Create an engine with the options of `StartEngine`, run it, and return the exit code.

    Args:
        sock: Channel to the HTTP process.
        parent: Process id of the HTTP process. This process exits when the HTTP process ends.
    """
    # Ignore SIGTERM, which some supervisors send to the whole process group: the parent process
    # decides when this process stops.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(parent),), daemon=True).start()
    link = processes.MessageSocket(sock)
    try:
        engine = Engine(**_receive_options(link))
    except EOFError:
        return 1
    except Exception as error:
        link.send(encode(EngineFailed(describe_start_error(error))))
        link.close()
        return 1
    try:
        EngineWorker(engine, link).run()
    except Exception as error:
        log_line(f"the engine failed: {error!r}")
        return 1
    return 0
