"""The engine's process: takes commands, steps, tells what is new.

It runs beside the HTTP process, so that HTTP never takes the interpreter from a step, and tells
its news in one frame a step, the log-probabilities of a long prompt in parts, one a step. While the
other side does not read, steps go on and what is new waits in the engine, where a request's news is
one entry however much it grows.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jpaged import Engine, RequestDelta, SamplingParams
from jpaged.serve.camera import Camera
from jpaged.serve.errors import say
from jpaged.serve.frames import (
    Abort,
    Add,
    AskFrames,
    Command,
    Died,
    Ready,
    Refused,
    Start,
    Stop,
    Turn,
)
from jpaged.serve.link import Link

IDLE_BEAT = 0.5
"""Seconds between two signs of life of an engine that has nothing to do."""

PART = 512
"""Prompt tokens whose log-probabilities, up to twenty each, are told at a time."""

_STATS_EVERY = 0.2  # seconds
_COMMANDS_TIME = 0.005  # seconds before a step, and what the last command takes
_PARENT_CHECK = 1.0  # seconds


class Worker:
    """Drives one engine for whoever is at the other end of a link."""

    def __init__(self, engine: Engine, link: Link):
        self._engine = engine
        self._link = link
        self._camera = Camera(engine)
        self._turn = 0
        self._stopped = False
        self._stats_due = 0.0
        self._parts: dict[str, deque[RequestDelta]] = {}  # what a request's news are told in

    def run(self) -> None:
        """Serve until told to stop or the other side is gone; what is unfinished is aborted.

        Raises:
            RuntimeError: a step failed. The other side knows.
        """
        self._link.send(_description(self._engine))
        try:
            while not self._stopped:
                self._go_round()
        except EOFError:
            pass
        except Exception as error:
            self._link.send(Died(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._engine.abort_all()
            self._link.close()

    def _go_round(self) -> None:
        """One turn: commands in, a step, news out."""
        self._take_commands()
        if self._engine.has_work:
            self._engine.advance()
            self._camera.see()
        self._turn += 1
        if self._link.is_clear:
            self._tell()

    def _take_commands(self) -> None:
        """Obey those who wait; beside requests that run not all of many, whose steps wait."""
        busy = self._engine.has_work
        can_tell = self._parts and self._link.is_clear
        command = self._link.receive(0.0 if busy or can_tell else IDLE_BEAT)
        end = time.monotonic() + _COMMANDS_TIME
        while command is not None:
            self._obey(command)
            if self._stopped or (busy and time.monotonic() > end):
                break
            command = self._link.receive(0.0)

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
            self._link.send(Turn(self._turn, news, stats))

    def _parted(self, news: list[RequestDelta]) -> list[RequestDelta]:
        """What to tell now: of what takes either side long one part, in each request's order."""
        told = []
        for delta in news:
            if len(delta.prompt_logprobs or ()) > PART or delta.request_id in self._parts:
                self._parts.setdefault(delta.request_id, deque()).extend(_parts_of(delta))
            else:
                told.append(delta)
        if self._parts:
            request_id, parts = next(iter(self._parts.items()))
            told.append(parts.popleft())
            while parts and not parts[0].prompt_logprobs:  # what came after them is short
                told.append(parts.popleft())
            if not parts:
                del self._parts[request_id]
        return told

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Abort():
                for request_id in command.request_ids:
                    self._parts.pop(request_id, None)
                    self._engine.abort(request_id)
            case AskFrames():
                self._link.send(self._camera.fetch(command.epoch, command.tokens))
            case Stop():
                self._stopped = True

    def _add(self, command: Add) -> None:
        prompt = {
            "prompt_token_ids": command.prompt_token_ids,
            "cache_salt": command.cache_salt,
        }
        try:
            params = SamplingParams(**command.params)
            self._engine.add_request(
                prompt, params, request_id=command.request_id, priority=command.priority
            )
        except (TypeError, ValueError) as error:
            self._link.send(Refused(command.request_id, str(error)))
        except Exception as error:  # of this request; if a step failed, the next one says so
            say(f"{command.request_id}: {error!r}")
            self._link.send(Refused(command.request_id, "the request failed", is_fault=True))


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
    )


def serve_engine(sock: socket.socket) -> int:
    """The whole life of the engine's process, which gets its options first; its exit code."""
    link = Link(sock)
    try:
        engine = Engine(**_options(link))
    except EOFError:
        return 1
    except Exception as error:
        link.send(Died(why_not(error)))
        link.close()
        return 1
    try:
        Worker(engine, link).run()
    except Exception as error:
        say(f"the engine failed: {error!r}")
        return 1
    return 0


def why_not(error: Exception) -> str:
    """Why there is no engine, for whoever asked for one; what nobody foresaw goes to the log."""
    words = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in words:
        remedy = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs"
        return f"the device's memory does not suffice: {remedy} ({words})"
    if not (words and isinstance(error, (ValueError, RuntimeError, OSError))):
        traceback.print_exception(error, file=sys.stderr)
        return f"{type(error).__name__}: {words}"
    return words


def _options(link: Link) -> dict[str, Any]:
    while True:
        command = link.receive(IDLE_BEAT)
        if isinstance(command, Start):
            return command.options


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it does at the moment."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK)
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """`python -m jpaged.serve.worker FD PARENT`: serve over the inherited socket."""
    # Ctrl-C reaches the whole terminal, SIGTERM of some supervisors the whole group of processes;
    # what becomes of the engine is for the parent to say.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(int(argv[2]),), daemon=True).start()
    return serve_engine(socket.socket(fileno=int(argv[1])))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
