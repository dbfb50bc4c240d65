"""The engine's process: takes commands, steps, tells what is new.

It is apart from the HTTP process, so that HTTP never takes the interpreter from a step, and sends
one message a step with the news of all requests; the log-probabilities of a long prompt go in
parts, one a step. While the other side does not read, steps go on and the news wait in the engine,
where those of a request are one entry however much it grows.
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
from typing import Any

from jpaged import Engine, RequestDelta, processes
from jpaged.errors import ErrorInfo, ErrorKind, info_of
from jpaged.serve.dashboard.sampler import PoolSampler
from jpaged.serve.engine.messages import (
    Abort,
    AskPoolFrames,
    Command,
    Died,
    EngineRequest,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Turn,
    command_of,
    encode,
)
from jpaged.serve.errors import say

IDLE_BEAT = 0.5
"""Seconds between two signs of life of an engine that has nothing to do."""

PART = 512
"""Prompt tokens whose log-probabilities, up to twenty each, are told at a time."""

_STATS_EVERY = 0.2  # seconds
_COMMANDS_TIME = 0.005  # seconds before a step, and what the last command takes
_PARENT_CHECK = 1.0  # seconds


class Worker:
    """Runs one engine for the process at the other end of a link."""

    def __init__(self, engine: Engine, link: processes.Link):
        self._engine = engine
        self._link = link
        self._sampler = PoolSampler(engine)
        self._stopped = False
        self._stats_due = 0.0
        self._parts: dict[str, deque[RequestDelta]] = {}  # what a request's news are told in

    def run(self) -> None:
        """Serve until told to stop or the other side is gone; what is unfinished is aborted.

        Raises:
            RuntimeError: a step failed. The other side knows.
        """
        self._send(_description(self._engine))
        try:
            while not self._stopped:
                self._go_round()
        except EOFError:
            pass
        except Exception as error:
            self._send(Died(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._engine.abort_all()
            self._link.close()

    def _go_round(self) -> None:
        """One turn: commands in, a step, news out."""
        self._take_commands()
        if self._engine.has_work:
            self._engine.advance()
            self._sampler.after_step()
        if self._link.is_clear:
            self._tell()

    def _send(self, report: Report) -> None:
        self._link.send(encode(report))

    def _receive(self, timeout: float) -> Command | None:
        message = self._link.receive(timeout)
        return None if message is None else command_of(message)

    def _take_commands(self) -> None:
        """Run the commands that wait; only some of many while requests run, whose steps wait."""
        busy = self._engine.has_work
        can_tell = self._parts and self._link.is_clear
        command = self._receive(0.0 if busy or can_tell else IDLE_BEAT)
        end = time.monotonic() + _COMMANDS_TIME
        while command is not None:
            self._obey(command)
            if self._stopped or (busy and time.monotonic() > end):
                break
            command = self._receive(0.0)

    def _tell(self) -> None:
        news, now = self._engine.take_deltas(), time.monotonic()
        for delta in news:
            if delta.error is not None:  # clients are told where to look, not what
                say(f"{delta.request_id}: {delta.error}")
        news = self._parted(news)
        idle = not self._engine.has_work
        stats = None
        if idle or now >= self._stats_due:
            stats, self._stats_due = self._engine.stats(), now + _STATS_EVERY
        if news or stats is not None:
            self._send(Turn(news, stats))

    def _parted(self, news: list[RequestDelta]) -> list[RequestDelta]:
        """The news to send now, in each request's order; of long ones one part, in turn."""
        told = []
        for delta in news:
            if len(delta.prompt_logprobs or ()) > PART or delta.request_id in self._parts:
                self._parts.setdefault(delta.request_id, deque()).extend(_parts_of(delta))
            else:
                told.append(delta)
        if self._parts:
            request_id = next(iter(self._parts))
            parts = self._parts.pop(request_id)
            told.append(parts.popleft())
            while parts and not parts[0].prompt_logprobs:  # what came after them is short
                told.append(parts.popleft())
            if parts:  # after those of others
                self._parts[request_id] = parts
        return told

    def _obey(self, command: Command) -> None:
        match command:
            case EngineRequest():
                self._add(command)
            case Abort():
                for request_id in command.request_ids:
                    self._parts.pop(request_id, None)
                    self._engine.abort(request_id)
            case AskPoolFrames():
                self._send(self._sampler.fetch(command.snapshot, command.tokens))
            case Stop():
                self._stopped = True

    def _add(self, request: EngineRequest) -> None:
        name, ids, salt = request.request_id, request.prompt_token_ids, request.cache_salt
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        try:
            self._engine.add_request(
                prompt, request.params, request_id=name, priority=request.priority
            )
        except (TypeError, ValueError) as error:
            self._send(Refused(name, info_of(error)))
        except Exception as error:  # of this request; if a step failed, the next one says so
            say(f"{name}: {error!r}")
            self._send(Refused(name, ErrorInfo("", ("it failed",), kind=ErrorKind.INTERNAL)))


def _parts_of(delta: RequestDelta) -> Iterator[RequestDelta]:
    """The same news in several: first a prompt's log-probabilities, then with the last the rest."""
    scores = delta.prompt_logprobs
    while scores is not None and len(scores) > PART:
        cached = delta.num_cached_tokens
        part = scores[:PART]
        yield RequestDelta(delta.request_id, [], prompt_logprobs=part, num_cached_tokens=cached)
        scores = scores[PART:]
    yield replace(delta, prompt_logprobs=scores)


def _description(engine: Engine) -> Ready:
    config = engine.runtime_config
    return Ready(
        folder=str(engine.folder),
        vocab_size=engine.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        cache_dtype=engine.config.kv_cache_dtype,
    )


def why_not(error: Exception) -> str:
    """Why no engine was made, in one line; an unforeseen error also goes to the log."""
    words = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in words:
        remedy = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs"
        return f"the device's memory does not suffice: {remedy} ({words})"
    if not (words and isinstance(error, (ValueError, RuntimeError, OSError))):
        traceback.print_exception(error, file=sys.stderr)
        return f"{type(error).__name__}: {words}"
    return words


def _options(link: processes.Link) -> dict[str, Any]:
    while True:
        message = link.receive(IDLE_BEAT)
        if message is not None and isinstance(command := command_of(message), Start):
            return command.options


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it does at the moment."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK)
    os._exit(1)


def main(sock: socket.socket, parent: str) -> int:
    """Make an engine of the options that come first, and serve it until the parent, the process of
    that number, says otherwise or is gone. Returns the exit code."""
    # Some supervisors send SIGTERM to the whole group of processes; what becomes of the engine is
    # for the parent to say.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(int(parent),), daemon=True).start()
    link = processes.Link(sock)
    try:
        engine = Engine(**_options(link))
    except EOFError:
        return 1
    except Exception as error:
        link.send(encode(Died(why_not(error))))
        link.close()
        return 1
    try:
        Worker(engine, link).run()
    except Exception as error:
        say(f"the engine failed: {error!r}")
        return 1
    return 0
