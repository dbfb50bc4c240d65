"""The process whose forks tokenise.

It loads the tokenizer once and forks whenever the server wants a fork, which takes milliseconds; so
the server ends a fork as soon as its work is not wanted, or takes too long. It has no threads
and no JAX. All of them end when the server does, however that ends.
"""

import gc
import json
import os
import resource
import signal
import socket
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from jpaged import GrammarTrial, StructuredOutputs, Tokenizer, processes
from jpaged.errors import ErrorInfo, ErrorKind, error_info

MIB = 2**20

_encode = msgspec.msgpack.encode


class TokenizingSettings(msgspec.Struct, frozen=True):
    """What forks need.

    Attributes:
        folder: The checkpoint's.
        chat_template: To use instead of the model's.
        allow_special_tokens: Whether text of messages may become special tokens.
        max_characters: Of what a chat template may write.
        max_memory: Bytes that one fork may take in addition to what all share.
    """

    folder: str
    chat_template: str | None = None
    allow_special_tokens: bool = False
    max_characters: int = 32 * MIB
    max_memory: int = 1024 * MIB


class TokenizeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of work: tokenise `text` or `messages`, make text of `token_ids`, or see whether a
    grammar can be made of a `spec`.

    Attributes:
        text: A prompt.
        add_special_tokens: To a prompt.
        messages: A conversation; the arguments of tool calls in it are JSON text.
        options: Of its template.
        last: Tokens to give of the end; None for all.
        most: Tokens of which a text with more is not wanted, unless only its last are.
        strings: Give each token's text too.
        token_ids: Tokens.
        form: What answers are to obey.
    """

    text: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    last: int | None = None
    max_num_tokens: int | None = None
    strings: bool = False
    token_ids: list[int] | None = None
    spec: StructuredOutputs | None = None


class TokenizeResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an order.

    Attributes:
        token_ids: The text's tokens.
        text: The tokens' text.
        strings: The text of each token.
        is_longer: No result: there are more tokens than `max_num_tokens`.
        refused: No result: what is wrong with the order.
        spent: No result: what it took too much of.
        mistake: No result: where the chat template's syntax is wrong.
        failed: No result: an unforeseen error.
    """

    token_ids: list[int] = []
    text: str = ""
    strings: list[str] | None = None
    is_longer: bool = False
    job_error: ErrorInfo | None = None
    exceeded_limit: str | None = None
    template_error: str | None = None
    internal_error: str | None = None


class StartFork(msgspec.Struct, frozen=True, tag=True):
    """Command to the process: make a fork, whose end of the line comes with the message.

    Attributes:
        number: Name of the fork.
        most_seconds: CPU seconds that one order may take; 0 for no bound.
    """

    number: int
    max_cpu_seconds: float


class EndFork(msgspec.Struct, frozen=True, tag=True):
    """Command to the process: kill a fork, unless it has ended. If a socket comes with the message,
    the process sends there the exit code, or minus the signal that ended the fork; None if unknown.
    """

    number: int


class TokenizingProcess:
    """The process, as the server sees it.

    Attributes:
        settings: What its forks need.
        num_starts: How often it was started.
    """

    def __init__(self, settings: TokenizingSettings):
        self.settings = settings
        self.num_starts = 0
        self._restart_lock = threading.Lock()
        self._num_forks = 0
        self._start()

    @property
    def pid(self) -> int:
        """Its process id, and the group's of all forks."""
        return self._child.process.pid

    def wait_ready(self) -> None:
        """Wait until it has loaded the tokenizer.

        Raises:
            ValueError: there is none.
            RuntimeError: the process has ended.
        """
        if self._is_ready:
            return
        payload = processes.receive(self._child.sock)
        if payload is None:
            raise RuntimeError("the process that tokenises ended while it started")
        if (error := msgspec.msgpack.decode(payload)) is not None:
            raise ValueError(error)
        self._is_ready = True

    def fork(self, max_cpu_seconds: float = 0) -> tuple[int, socket.socket]:
        """A new fork: what to call it, and the line to it.

        Args:
            most_seconds: The processor's time after which it ends in the middle of an order; 0 for
                no bound.

        Raises:
            ConnectionError: the process has ended.
            OSError: the system has no line for it.
        """
        self._num_forks += 1
        return self._num_forks, self._send_with_socket(StartFork(self._num_forks, max_cpu_seconds))

    def ask_exit_code(self, number: int) -> socket.socket:
        """Ask how a fork ended that closed its line; return the socket to which the answer comes.

        Raises:
            ConnectionError: the process has ended.
        """
        return self._send_with_socket(EndFork(number))

    def _send_with_socket(self, command: StartFork | EndFork) -> socket.socket:
        """Send a command with one end of a new socket pair, and return the other end."""
        ours, theirs = processes.socket_pair()
        with theirs:
            try:
                message = processes.frame_message(_encode(command))
                socket.send_fds(self._child.sock, [message], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ConnectionError(f"the process that tokenises has ended: {error}") from None
        return ours

    def end_fork(self, number: int) -> None:
        """End a fork at once, whatever it does."""
        with suppress(OSError):  # the process has ended, and is to be started anew
            processes.send(self._child.sock, _encode(EndFork(number)))

    def restart(self, num_starts_before: int) -> None:
        """Start it anew, unless that was done since `num_starts` was `num_starts_before`, and wait for it.

        Raises:
            OSError, RuntimeError, ValueError: it does not start.
        """
        with self._restart_lock:
            if self.num_starts == num_starts_before:
                self.close()
                self._start()
                self.wait_ready()

    def close(self) -> None:
        """End it and all forks."""
        self._child.kill_and_close()

    def _start(self) -> None:
        child = processes.Child(
            "jpaged.serve.engine.tokenizing_process",
            is_group_leader=True,  # Ctrl-C is the server's; and all forks can be ended at once
            extra_env={"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        with suppress(OSError):  # it has ended, which `wait_ready` finds out
            processes.send(child.sock, _encode(self.settings))
        # Only now: what the event loop sends meanwhile must not come before the settings.
        self._child, self._is_ready = child, False
        self.num_starts += 1


def main(control: socket.socket) -> int:
    """Load the tokenizer and fork as told; ends with the server."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server's, which drains first
    payload = processes.receive(control)
    if payload is None:
        return 1
    settings = msgspec.msgpack.decode(payload, type=TokenizingSettings)
    try:
        runner = TokenizeJobRunner(settings)
    except ValueError as error:
        processes.send(control, _encode(str(error)))
        return 1
    processes.send(control, _encode(None))
    decoder = msgspec.msgpack.Decoder(StartFork | EndFork)
    gc.collect()
    gc.freeze()  # or collecting would copy the pages that forks share
    pids: dict[int, int] = {}
    while (payload := processes.receive(control, files := list[int]())) is not None:
        match decoder.decode(payload):
            case EndFork(number):
                code = None
                if pid := pids.pop(number, 0):
                    os.kill(pid, signal.SIGKILL)  # of no effect on a fork that has ended
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                for file in files:
                    with socket.socket(fileno=file) as reply_socket, suppress(OSError):
                        processes.send(reply_socket, _encode(code))
            case StartFork(number, max_cpu_seconds):
                if pid := os.fork():
                    pids[number] = pid
                    os.close(files[0])
                    continue
                control.close()
                # Open until the exit: who sees it closed kills the fork and asks for its exit code.
                channel = socket.socket(fileno=files[0])
                try:
                    _limit_memory(settings.max_memory)
                    _run_jobs(channel, runner, max_cpu_seconds)
                except BrokenPipeError:  # its client has gone
                    pass
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(0)
    os.killpg(0, signal.SIGKILL)
    return 1


def _run_jobs(channel: socket.socket, runner: "TokenizeJobRunner", max_cpu_seconds: float) -> None:
    """Run the orders that come over `channel`, until it is closed."""
    decoder = msgspec.msgpack.Decoder(TokenizeJob)
    while (payload := processes.receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)  # at whose end the system ends it
        result = runner.run_job(decoder.decode(payload))
        signal.setitimer(signal.ITIMER_PROF, 0)
        processes.send(channel, _encode(result))
        payload = result = None


def _limit_memory(most: int) -> None:
    _set_limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # where the system does not tell, there is no bound
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + most)


def _set_limit(limit_kind: int, most: int) -> None:
    _, hard = resource.getrlimit(limit_kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(limit_kind, (most, hard))


class TokenizeJobRunner:
    """Does orders.

    Args:
        settings: As of the process.

    Raises:
        ValueError: the folder has no tokenizer.
    """

    def __init__(self, settings: TokenizingSettings):
        self._settings = settings
        self._tokenizer = Tokenizer.from_folder(Path(settings.folder))
        self._tokenizer.prepare()
        self._trial = GrammarTrial(self._tokenizer)

    def run_job(self, job: TokenizeJob) -> TokenizeResult:
        """The result of an order; no exception leaves it."""
        try:
            if job.token_ids is not None:
                return TokenizeResult(text=self._tokenizer.decode(job.token_ids))
            if job.spec is not None:
                self._trial.run(job.spec)
                return TokenizeResult()
            return self._tokenize(job)
        except MemoryError:
            return TokenizeResult(
                exceeded_limit=f"more than the limit of {self._settings.max_memory // MIB} MiB of memory"
            )
        except RecursionError:
            if job.spec is not None:
                problem = "nests too deep: use fewer references and cases within each other"
                path = f"structured_outputs.{job.spec.kind}"
                return TokenizeResult(
                    job_error=ErrorInfo(path, (problem,), kind=ErrorKind.TOO_LARGE)
                )
            problem = "the chat template nests too deep with these messages"
            return TokenizeResult(job_error=ErrorInfo("", (problem,)))
        except (TypeError, ValueError) as error:
            syntax = error.__cause__
            if isinstance(syntax, jinja2.TemplateSyntaxError):
                template_error = f"line {syntax.lineno}: {syntax.message}"
                return TokenizeResult(job_error=error_info(error), template_error=template_error)
            return TokenizeResult(job_error=error_info(error))
        except Exception as error:
            return TokenizeResult(internal_error=repr(error)[:1000])

    def _tokenize(self, job: TokenizeJob) -> TokenizeResult:
        tokenizer, settings = self._tokenizer, self._settings
        chat = None
        text = job.text or ""
        if job.messages is not None:
            chat = tokenizer.write_chat(
                [_parse_call_arguments(message) for message in job.messages],
                chat_template=settings.chat_template,
                allow_special_tokens=settings.allow_special_tokens,
                max_characters=settings.max_characters,
                **job.options,
            )
            text = chat.text
        if (
            job.last is None
            and job.max_num_tokens is not None
            and tokenizer.is_longer(text, job.max_num_tokens)
        ):
            return TokenizeResult(is_longer=True)
        if chat is not None:
            ids = tokenizer.encode_chat(chat, last=job.last)
        else:
            special = job.add_special_tokens
            ids = tokenizer.encode(text, add_special_tokens=special, last=job.last)
        strings = [tokenizer.decode([each]) for each in ids] if job.strings else None
        return TokenizeResult(token_ids=ids, strings=strings)


def _parse_call_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: the arguments of its calls are objects."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls}
