"""The tokenizing process, whose forks tokenize texts and test structured-output specs.

The process loads the tokenizer once and forks on the server's command. A fork takes milliseconds to
start. So the server kills a fork as soon as its client disconnects or its job takes too long.

The process has one thread and never loads JAX. The process and its forks end when the server's
end of the channel closes.
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
    """Settings of the tokenizing process.

    Attributes:
        folder: Path of the checkpoint folder.
        chat_template: Jinja template to use instead of the model's chat template.
        allow_special_tokens: Whether the text of messages may become special tokens.
        max_characters: Maximum number of characters that a chat template may write.
        max_memory: Maximum bytes that a fork may allocate in addition to the shared memory.
    """

    folder: str
    chat_template: str | None = None
    allow_special_tokens: bool = False
    max_characters: int = 32 * MIB
    max_memory: int = 1024 * MIB


class TokenizeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Job that a fork of the tokenizing process runs.

    The fork tokenizes `text` or `messages`, decodes `token_ids`, or tests whether the
    structured-output spec `spec` can be compiled within the limits of `GrammarTrial`.

    Attributes:
        text: Prompt to tokenize.
        add_special_tokens: Whether to add the tokenizer's special tokens to `text`.
        messages: Conversation to tokenize. The arguments of its tool calls are JSON text.
        options: Further options of `Tokenizer.write_chat` for `messages`, such as `tools`.
        last: Number of tokens to return from the end; None for all.
        max_num_tokens: Number of tokens above which the fork may return `is_longer` instead of
            tokens. Has no effect if `last` is set.
        strings: Whether to return the text of each token too.
        token_ids: Token ids to decode.
        spec: Structured-output spec to test.
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
    """Result of a job.

    Attributes:
        token_ids: Token ids of the job's text or messages.
        text: Text of the job's token ids.
        strings: Text of each token.
        is_longer: Whether the job was skipped because it has more than `max_num_tokens` tokens.
        job_error: Why the job is invalid; None if the job is valid.
        exceeded_limit: Text that names the limit of time or memory that the job exceeded.
        template_error: Line and description of a syntax error in the chat template.
        internal_error: Unexpected error that ended the job, for the log.
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
    """Command to fork the tokenizing process. The fork's channel is sent with the message.

    Attributes:
        number: Number of the new fork.
        max_cpu_seconds: Maximum CPU time of a job in seconds; 0 for no maximum.
    """

    number: int
    max_cpu_seconds: float


class EndFork(msgspec.Struct, frozen=True, tag=True):
    """Command to kill a fork of the tokenizing process. The fork may have ended already.

    If a socket is sent with the message, the process writes the fork's exit code to the socket:
    minus the signal's number if a signal ended the fork, and None if the fork is unknown.

    Attributes:
        number: Number of the fork.
    """

    number: int


class TokenizingProcess:
    """The server's side of the tokenizing process.

    Attributes:
        settings: Settings of the process.
        num_starts: Number of times that the process was started.
    """

    def __init__(self, settings: TokenizingSettings):
        self.settings = settings
        self.num_starts = 0
        self._restart_lock = threading.Lock()
        self._num_forks = 0
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the tokenizing process, which is also the process group id of its forks."""
        return self._child.process.pid

    def wait_ready(self) -> None:
        """Wait until the process has loaded the tokenizer.

        Raises:
            ValueError: The checkpoint has no tokenizer that can be loaded.
            RuntimeError: The process has ended.
        """
        if self._is_ready:
            return
        payload = processes.receive(self._child.sock)
        if payload is None:
            raise RuntimeError("the tokenizing process ended during its start")
        if (error := msgspec.msgpack.decode(payload)) is not None:
            raise ValueError(error)
        self._is_ready = True

    def fork(self, max_cpu_seconds: float = 0) -> tuple[int, socket.socket]:
        """Start a fork, and return its number and the server's end of its channel.

        Args:
            max_cpu_seconds: Maximum CPU time of a job in seconds, after which a signal kills the
                fork; 0 for no maximum.

        Raises:
            ConnectionError: The tokenizing process has ended.
            OSError: No socket pair could be created.
        """
        self._num_forks += 1
        return self._num_forks, self._send_with_socket(StartFork(self._num_forks, max_cpu_seconds))

    def ask_exit_code(self, number: int) -> socket.socket:
        """Request the exit code of a fork, and return the socket that will receive the code.

        The tokenizing process, which is the parent of the fork, first kills the fork if it still
        runs.

        Raises:
            ConnectionError: The tokenizing process has ended.
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
                raise ConnectionError(f"the tokenizing process has ended: {error}") from None
        return ours

    def end_fork(self, number: int) -> None:
        """Send the command to kill a fork, without waiting for the fork to end."""
        with suppress(OSError):  # the process has ended, which also ended its forks
            processes.send(self._child.sock, _encode(EndFork(number)))

    def restart(self, num_starts_before: int) -> None:
        """Restart the tokenizing process, and wait until it is ready. Do nothing if another caller
        has already restarted it.

        Args:
            num_starts_before: Value of `num_starts` when the caller last used the process.

        Raises:
            OSError, RuntimeError, ValueError: The process does not start.
        """
        with self._restart_lock:
            if self.num_starts == num_starts_before:
                self.close()
                self._start()
                self.wait_ready()

    def close(self) -> None:
        """Kill the process and all its forks."""
        self._child.kill_and_close()

    def _start(self) -> None:
        child = processes.Child(
            "jpaged.serve.engine.tokenizing_process",
            # With a separate process group, Ctrl-C reaches only the server, and the server can kill
            # all forks together.
            is_group_leader=True,
            extra_env={"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        # Ignore that the process has ended: `wait_ready` will raise an error.
        with suppress(OSError):
            processes.send(child.sock, _encode(self.settings))
        # Assign `_child` last. The event loop may send commands as soon as `_child` is set, but the
        # settings must be the first message.
        self._child, self._is_ready = child, False
        self.num_starts += 1


def main(control: socket.socket) -> int:
    """Load the tokenizer, then run `StartFork` and `EndFork` commands until the channel closes.

    Args:
        control: Channel to the server.
    """
    # Ignore SIGTERM, because the server ends this process after its requests have finished.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    # Exclude the existing objects from later garbage collections. A collection in a fork would
    # write to these objects, and Linux would then copy the memory pages that all forks share.
    gc.freeze()
    pids: dict[int, int] = {}
    while (payload := processes.receive(control, files := list[int]())) is not None:
        match decoder.decode(payload):
            case EndFork(number):
                code = None
                if pid := pids.pop(number, 0):
                    os.kill(pid, signal.SIGKILL)  # SIGKILL has no effect on an ended fork
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
                # Keep the channel open until the fork exits. The server kills a fork whose channel
                # closes, which would change the exit code.
                channel = socket.socket(fileno=files[0])
                try:
                    _limit_memory(settings.max_memory)
                    _run_jobs(channel, runner, max_cpu_seconds)
                except BrokenPipeError:  # the server has closed the channel during a job
                    pass
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(0)
    os.killpg(0, signal.SIGKILL)
    return 1


def _run_jobs(channel: socket.socket, runner: "TokenizeJobRunner", max_cpu_seconds: float) -> None:
    """Run the jobs that arrive over `channel`, until the channel closes."""
    decoder = msgspec.msgpack.Decoder(TokenizeJob)
    while (payload := processes.receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)  # SIGPROF kills the fork
        result = runner.run_job(decoder.decode(payload))
        signal.setitimer(signal.ITIMER_PROF, 0)
        processes.send(channel, _encode(result))
        payload = result = None


def _limit_memory(max_bytes: int) -> None:
    _set_limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # if /proc is missing, the memory is not limited
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + max_bytes)


def _set_limit(limit_kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(limit_kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(limit_kind, (limit, hard))


class TokenizeJobRunner:
    """Runs tokenizing jobs, in a fork.

    Args:
        settings: Settings of the tokenizing process.

    Raises:
        ValueError: The checkpoint has no tokenizer that can be loaded.
    """

    def __init__(self, settings: TokenizingSettings):
        self._settings = settings
        self._tokenizer = Tokenizer.from_folder(Path(settings.folder))
        self._tokenizer.prepare()
        self._trial = GrammarTrial(self._tokenizer)

    def run_job(self, job: TokenizeJob) -> TokenizeResult:
        """Run a job and return its result. Errors become a part of the result."""
        try:
            if job.token_ids is not None:
                return TokenizeResult(text=self._tokenizer.decode(job.token_ids))
            if job.spec is not None:
                self._trial.run(job.spec)
                return TokenizeResult()
            return self._tokenize(job)
        except MemoryError:
            limit = f"{self._settings.max_memory // MIB} MiB of memory"
            return TokenizeResult(exceeded_limit=f"more than the limit of {limit}")
        except RecursionError:
            if job.spec is not None:
                problem = "nests too deep: nest fewer references and alternatives"
                path = f"structured_outputs.{job.spec.kind}"
                return TokenizeResult(
                    job_error=ErrorInfo(path, (problem,), kind=ErrorKind.TOO_LARGE)
                )
            problem = "the chat template nests too deep with these messages: simplify the messages"
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
    """Return a message whose tool-call arguments are dicts instead of JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls}
