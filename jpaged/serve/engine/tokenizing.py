"""Tokenize texts, detokenize token ids and test structured-output specs, in forks of a process.

Short texts never wait for long texts, and texts never wait for tests of specs. If the client of a
job disconnects, the fork that runs the job is killed.
"""

import asyncio
import hashlib
import signal
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from jpaged import GrammarTrial, StructuredOutputs, Tokenizer, errors, processes
from jpaged.errors import ErrorInfo
from jpaged.serve.engine.messages import EngineInfo
from jpaged.serve.engine.tokenizing_process import (
    MIB,
    TokenizeJob,
    TokenizeResult,
    TokenizingProcess,
)
from jpaged.serve.errors import (
    ApiError,
    context_length_error,
    error_from_info,
    field_error,
    internal_error,
    log_line,
    unavailable_error,
)

_MIN_TOKENIZE_LIMIT = 65536
"""Minimum number of tokens that `/tokenize` accepts for any model."""

MAX_SHORT_JOB_BYTES = 16 * 1024
"""Maximum size in bytes of a job that starts in the queue of short jobs."""

_SHORT_JOB_CPU_S = 0.25
"""Maximum CPU time of a short job in seconds. A job that takes longer becomes a long job."""

_NUM_PROMPT_END_TOKENS = 32
"""Number of tokens that `text_end` decodes. In some vocabularies a token is a single byte."""

_MAX_TRIES = 4
"""Maximum number of attempts to run a job, if forks end before the job starts."""

MAX_TRIAL_RESULTS = 1024
"""Maximum number of structured-output specs whose test results are stored, accepted or refused."""

LIMIT_ERROR_TTL_S = 60.0
"""Seconds for which the server refuses a structured-output spec whose test run exceeded a limit.

After this time, the spec is tested again: it may pass when the machine is less busy.
"""

_LIMIT_SIGNALS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP}
)
"""Signals that kill a fork when its job crashes or exceeds a limit of time, stack or memory.

Any other signal comes from outside, such as SIGKILL when the machine runs out of memory.
"""

_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(TokenizeResult)


class TokenizingService:
    """Service that tokenizes texts, detokenizes token ids and tests structured-output specs.

    Args:
        tokenizer: The model's tokenizer, used in this process for single tokens.
        process: Tokenizing process, whose forks run the jobs.
        info: Description of the engine.
        text_timeout: Maximum seconds per job.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        process: TokenizingProcess,
        info: EngineInfo,
        text_timeout: float,
    ):
        self.max_model_len, self._vocab_size = info.max_model_len, info.vocab_size
        self._tokenizer = tokenizer
        self._max_token_characters = max(map(len, tokenizer.hf_tokenizer.get_vocab()))
        self._workers = TokenizingWorkers(process, text_timeout)
        self._trial_workers = TokenizingWorkers(process, text_timeout, max_short_bytes=None)
        # Results of test runs of structured-output specs, each with the time at which the test run
        # ended. The key is a digest of the `TokenizeJob`.
        self._trial_results: OrderedDict[bytes, tuple[TokenizeResult, float]] = OrderedDict()
        self._trial_locks: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = (
            WeakValueDictionary()
        )

    async def check_template(self) -> None:
        """Check the syntax of the server's chat template with a test message.

        Errors that the template itself raises are ignored.

        Raises:
            ValueError: The template has a syntax error.
        """
        result = await self._workers.run_job(
            TokenizeJob(messages=[{"role": "user", "content": "a"}])
        )
        if result.template_error is not None:
            message = f"is not a valid Jinja template ({result.template_error}): correct it"
            raise ValueError(f"--chat-template {message}")

    async def check_tools(self) -> None:
        """Check that the chat template writes the tools of a test conversation.

        Errors that the template itself raises are ignored.

        Raises:
            ValueError: The template ignores tools.
        """
        messages = [{"role": "user", "content": "a"}]
        function = {"name": "a", "description": "a", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        without_tools = await self._workers.run_job(TokenizeJob(messages=messages))
        with_tools = await self._workers.run_job(
            TokenizeJob(messages=messages, options={"tools": tools})
        )
        if without_tools.token_ids and without_tools.token_ids == with_tools.token_ids:
            raise ValueError(
                "--enable-auto-tool-choice: the chat template ignores tools: "
                "pass a template with tools as --chat-template, or omit the flag"
            )

    async def prompt_ids(
        self, prompt: list[int] | TokenizeJob, path: str, max_tokens: int | None, keep: int | None
    ) -> list[int]:
        """Return the token ids of a prompt, after checking that prompt and answer fit the model.

        Args:
            prompt: Token ids, or a job whose result is the prompt.
            path: Path of the prompt's field, for errors.
            max_tokens: Maximum number of tokens in the answer. With None, the prompt only has to
                leave space for one token.
            keep: Number of tokens to keep at the end of the prompt. With -1, keep as many tokens as
                fit. With None, keep all.

        Raises:
            ApiError: The prompt is invalid or too long.
        """
        max_num_tokens = self.max_model_len
        max_prompt_tokens = max_num_tokens - max(max_tokens or 0, 1)
        num_kept = None if keep is None else max_prompt_tokens if keep == -1 else keep
        if isinstance(prompt, list):
            ids = self._check_token_ids(prompt, path)
        else:
            last = None if num_kept is None else max(min(num_kept, max_num_tokens), 1)
            ids = (
                await self._run_job(replace(prompt, last=last, max_num_tokens=max_num_tokens), path)
            ).token_ids
        if num_kept is not None and max_prompt_tokens > 0:
            ids = ids[-num_kept:]
        if not ids:
            raise field_error(path, "has no tokens", remedy="pass at least one")
        if len(ids) >= max_num_tokens:
            raise self._too_long_error(path, errors.format_count(len(ids), "token"))
        if len(ids) > max_prompt_tokens:
            raise context_length_error(
                "max_tokens",
                f"plus the {errors.format_count(len(ids), 'token')} of ",
                path,
                f" exceed this model's maximum context length of {max_num_tokens} tokens",
                value=f"{max_tokens}",
                remedy=(
                    "lower ",
                    "max_tokens",
                    f" to {max_num_tokens - len(ids)}, or shorten the prompt",
                ),
            )
        return ids

    async def tokenize(self, job: TokenizeJob, path: str) -> TokenizeResult:
        """Return the tokens of a text or conversation, which may exceed the model's context.

        Raises:
            ApiError: The text is invalid, or longer than the limit of `/tokenize`, which is at
                least `_MIN_TOKENIZE_LIMIT` tokens.
        """
        max_num_tokens = max(4 * self.max_model_len, _MIN_TOKENIZE_LIMIT)
        return await self._run_job(replace(job, max_num_tokens=max_num_tokens), path)

    async def check_spec(self, spec: StructuredOutputs, path: str, client: str) -> None:
        """Test in a fork whether a structured-output spec can be compiled within the limits. If the
        result of an earlier test is stored, use this result.

        Args:
            spec: Structured-output spec. A spec that exceeds a limit or crashes the fork fails only
                this request.
            path: Path of the spec's field, for errors.
            client: Id of the client. The tests of different clients take turns.

        Raises:
            ApiError: The spec cannot be compiled or exceeds a limit. The status is 503 if the fork
                was killed from outside.
        """
        result = await self._run_trial(TokenizeJob(spec=spec), client)
        if result.exceeded_limit is not None:
            problem = f"cannot be enforced: compiling it takes more than {GrammarTrial.limits}"
            raise field_error(path, problem, remedy="simplify it")
        if result.job_error is not None:
            raise error_from_info(
                result.job_error.with_renamed_fields({f"structured_outputs.{spec.kind}": path})
            )
        if result.internal_error is not None:
            log_line(f"compiling a grammar failed: {result.internal_error}")
            raise internal_error()

    async def _run_trial(self, job: TokenizeJob, client: str) -> TokenizeResult:
        """Return the result of testing the job's structured-output spec.

        Use the stored result of an earlier test if there is one. Store the result of a new test
        unless it is an internal error.
        """
        digest = hashlib.sha256(_encoder.encode(job)).digest()
        # If a client sends several concurrent requests with the same structured-output spec, test
        # the spec only once.
        lock = self._trial_locks.setdefault((client, digest), asyncio.Lock())
        async with lock:
            result, since = self._trial_results.get(digest, (None, 0.0))
            is_old = time.monotonic() - since >= LIMIT_ERROR_TTL_S
            if result is None or (is_old and result.exceeded_limit is not None):
                result, since = await self._trial_workers.run_job(job, client), time.monotonic()
            if result.internal_error is None:
                self._trial_results[digest] = result, since
                self._trial_results.move_to_end(digest)
            while len(self._trial_results) > MAX_TRIAL_RESULTS:
                self._trial_results.popitem(last=False)
            return result

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens.

        Raises:
            ApiError: A token id is not in the model's vocabulary.
        """
        known = self._check_token_ids(token_ids, "tokens")
        return (await self._run_job(TokenizeJob(token_ids=known), "tokens")).text

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        decode = self._tokenizer.decode
        return {decode([token_id]): token_id for token_id in self._tokenizer.special_token_ids}

    def text_end(self, token_ids: list[int]) -> str:
        """Return the last part of a prompt's text, in which reasoning may already have started."""
        return self._tokenizer.decode(token_ids[-_NUM_PROMPT_END_TOKENS:])

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        return self._tokenizer.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character.

        If the tokenizer does not know its tokens' bytes, return the token's text as UTF-8.
        """
        get_token_bytes = self._tokenizer.token_bytes
        return (
            self.token_text(token_id).encode()
            if get_token_bytes is None
            else get_token_bytes(token_id)
        )

    def num_characters(self, token_id: int) -> int:
        """Return the number of characters whose first UTF-8 byte is in the token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token_id))

    def close(self) -> None:
        """Kill the forks and drop all jobs."""
        self._workers.close()
        self._trial_workers.close()

    async def _run_job(self, job: TokenizeJob, path: str) -> TokenizeResult:
        """Return the result of a job, and raise `ApiError` if the job fails.

        Refuse a text with too many characters without using a fork.
        """
        texts = [each["content"] for each in job.messages or ()] or [job.text or ""]
        num_characters = sum(map(len, texts))
        if job.last is None and num_characters > self.max_model_len * self._max_token_characters:
            raise self._too_long_error(path, f"{num_characters} characters")
        try:
            result = await self._workers.run_job(job)
        except OverflowError:
            problem = "contains an integer that is too large for 64 bits: use a smaller number"
            result = TokenizeResult(job_error=ErrorInfo(path, (problem,)))
        except (OSError, RuntimeError, ValueError) as error:
            result = TokenizeResult(internal_error=repr(error))
        if result.internal_error is not None:
            log_line(f"tokenizing failed: {result.internal_error}")
            raise internal_error()
        if result.exceeded_limit is not None:
            problem = (
                f"the chat template or tokenizing took {result.exceeded_limit}: send less text"
            )
            raise field_error(path, problem, shows_path=False)
        if result.job_error is not None:
            if result.job_error.path:
                raise ApiError(400, result.job_error)
            raise field_error(path, str(result.job_error), shows_path=False)
        if result.is_longer:
            raise self._too_long_error(
                path, f"more than {errors.format_count(job.max_num_tokens or 0, 'token')}"
            )
        return result

    def _check_token_ids(self, token_ids: list[int], path: str) -> list[int]:
        if token_ids and (worst := max(token_ids)) >= self._vocab_size:
            known = f"use ids from 0 to {self._vocab_size - 1}"
            raise field_error(path, f"contains the unknown token id {worst}: {known}")
        return token_ids

    def _too_long_error(self, path: str, length: str) -> ApiError:
        return context_length_error(
            path,
            f"has {length}, too many for this model's maximum context length of "
            f"{self.max_model_len} tokens, which includes the answer",
            remedy="shorten the prompt",
        )


class TokenizingWorkers:
    """Two forks of the tokenizing process, with queues of short and long jobs.

    One fork runs short jobs. A short job that exceeds its CPU time becomes a long job. The other
    fork runs long jobs, and runs short jobs while no long job waits.

    Clients take turns, and each client's jobs run in order of arrival. If the client of a job
    disconnects, the job is dropped. A fork that runs the job is killed and replaced.

    Args:
        process: Tokenizing process. Several `TokenizingWorkers` may share the process.
        timeout: Maximum seconds per job.
        max_short_bytes: Maximum size of a job that starts as a short job; None for no maximum.
    """

    def __init__(
        self,
        process: TokenizingProcess,
        timeout: float,
        max_short_bytes: int | None = MAX_SHORT_JOB_BYTES,
    ):
        self._process, self._timeout, self._max_short_bytes = process, timeout, max_short_bytes
        self._short_jobs, self._long_jobs = _FairQueue(), _FairQueue()
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run_worker(takes_long=it)) for it in (False, True)]

    async def run_job(self, job: TokenizeJob, client: str = "") -> TokenizeResult:
        """Run a job in a fork and return its result. Clients take turns.

        Raises:
            ApiError: The job could not run and may be retried; the status is 503.
            OSError, RuntimeError, ValueError: The tokenizing process does not start.
        """
        data = _encoder.encode(job)
        future = asyncio.get_running_loop().create_future()
        is_long = self._max_short_bytes is not None and len(data) > self._max_short_bytes
        self._enqueue(_QueuedJob(data, client, future, is_long, is_trial=job.spec is not None))
        return await future

    def close(self) -> None:
        """Kill the forks and drop the waiting jobs."""
        for task in self._tasks:
            task.cancel()

    async def _run_worker(self, *, takes_long: bool) -> None:
        fork: _ForkConnection | None = None
        try:
            while True:
                queued_job = await self._next_job(takes_long=takes_long)
                try:
                    fork = fork or await _ForkConnection.make(
                        self._process, 0 if takes_long else _SHORT_JOB_CPU_S
                    )
                    result = await fork.run_job(queued_job, self._timeout)
                except Exception as error:  # an error must not end this loop, which runs all jobs
                    code = None
                    if fork is not None:
                        if isinstance(error, EOFError):
                            code = await fork.exit_code(self._timeout)
                        fork.end()
                        fork = None
                    self._retry_or_fail(queued_job, error, code, had_cpu_limit=not takes_long)
                else:
                    if not queued_job.future.done():
                        queued_job.future.set_result(result)
        finally:
            if fork is not None:
                fork.end()

    async def _next_job(self, *, takes_long: bool) -> "_QueuedJob":
        while True:
            queued_job = (self._long_jobs.take() if takes_long else None) or self._short_jobs.take()
            if queued_job is not None:
                return queued_job
            self._changed.clear()
            await self._changed.wait()

    def _retry_or_fail(
        self, queued_job: "_QueuedJob", error: Exception, code: int | None, *, had_cpu_limit: bool
    ) -> None:
        """Queue an unfinished job again, or end the job with an error for its client.

        Args:
            queued_job: Unfinished job.
            error: Error that ended the attempt. EOFError if the fork ended during the job.
            code: Exit code of the fork. None if unknown, for example because the tokenizing
                process ended too.
            had_cpu_limit: Whether the fork was limited to `_SHORT_JOB_CPU_S` seconds of CPU time.
        """
        if queued_job.future.done():
            return
        queued_job.num_tries += 1
        if had_cpu_limit and code == -signal.SIGPROF:
            queued_job.is_long = True
            self._enqueue(queued_job)
        elif isinstance(error, ConnectionError) or (isinstance(error, EOFError) and code is None):
            if queued_job.num_tries < _MAX_TRIES:
                self._enqueue(queued_job)
            else:
                queued_job.future.set_exception(
                    _worker_error(f"ended {queued_job.num_tries} times")
                )
        elif isinstance(error, TimeoutError) and queued_job.is_trial:
            # The test of a structured-output spec has limits of CPU time and of wall time. If the
            # wall time runs out first, the machine was probably busy, so the client should retry.
            words = f"checking the output schema took longer than {self._timeout:g} seconds: retry"
            queued_job.future.set_exception(unavailable_error(words, 1))
        elif isinstance(error, TimeoutError):
            words = f"longer than the limit of {self._timeout:g} seconds"
            queued_job.future.set_result(TokenizeResult(exceeded_limit=words))
        elif code is not None and code < 0 and -code not in _LIMIT_SIGNALS:
            queued_job.future.set_exception(
                _worker_error(f"was killed ({signal.Signals(-code).name})")
            )
        elif code is not None and code >= 0:
            # A signal ends a fork that exceeds a limit. This fork exited by itself, so the job
            # exceeded no limit.
            queued_job.future.set_exception(_worker_error(f"ended with code {code}"))
        # A signal in `_LIMIT_SIGNALS` ended the fork. Most likely, native code aborted because
        # memory ran out. The job may also have crashed, for example by a stack overflow.
        elif isinstance(error, EOFError):
            most = self._process.settings.max_memory // MIB
            words = f"more than the limit of {most} MiB of memory, or crashed"
            queued_job.future.set_result(TokenizeResult(exceeded_limit=words))
        else:
            queued_job.future.set_exception(error)

    def _enqueue(self, queued_job: "_QueuedJob") -> None:
        (self._long_jobs if queued_job.is_long else self._short_jobs).put(queued_job)
        self._changed.set()


def _worker_error(reason: str) -> ApiError:
    return unavailable_error(f"the tokenizer worker {reason}: retry", 1)


@dataclass(eq=False)
class _QueuedJob:
    """A job that waits or runs, with the future of its result."""

    data: bytes
    client: str
    future: asyncio.Future[TokenizeResult]
    is_long: bool
    is_trial: bool
    num_tries: int = 0


class _FairQueue:
    """Queue of waiting jobs in which clients take turns."""

    def __init__(self):
        self._jobs_by_client: OrderedDict[str, deque[_QueuedJob]] = OrderedDict()

    def put(self, queued_job: _QueuedJob) -> None:
        """Add a job after the other jobs of its client."""
        self._jobs_by_client.setdefault(queued_job.client, deque()).append(queued_job)

    def take(self) -> _QueuedJob | None:
        """Remove and return the next job whose client still waits, or None if no job waits."""
        while self._jobs_by_client:
            client, queued_jobs = self._jobs_by_client.popitem(last=False)
            queued_job = queued_jobs.popleft()
            if queued_jobs:
                # Put the client at the end, so that clients take turns.
                self._jobs_by_client[client] = queued_jobs
            if not queued_job.future.done():
                return queued_job
        return None


class _ForkConnection:
    """A fork of the tokenizing process, and the channel to the fork."""

    def __init__(
        self,
        process: TokenizingProcess,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self._process, self._number = process, number
        self._reader, self._writer = reader, writer

    @classmethod
    async def make(cls, process: TokenizingProcess, max_cpu_seconds: float) -> "_ForkConnection":
        num_starts_before = process.num_starts
        try:
            number, sock = process.fork(max_cpu_seconds)
        except ConnectionError:
            await asyncio.to_thread(process.restart, num_starts_before)
            number, sock = process.fork(max_cpu_seconds)
        return cls(process, number, *await asyncio.open_unix_connection(sock=sock))

    async def exit_code(self, timeout: float) -> int | None:
        """Return the exit code of a fork that has closed its channel.

        Returns:
            Minus the signal's number if a signal ended the fork. None if the code is unknown after
            `timeout` seconds, because the tokenizing process has ended too.
        """
        try:
            sock = self._process.ask_exit_code(self._number)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            try:
                reply = await asyncio.wait_for(processes.read_message(reader), timeout)
                return msgspec.msgpack.decode(reply, type=int | None)
            finally:
                writer.close()
        except (OSError, EOFError):  # TimeoutError is an OSError
            return None

    async def run_job(self, queued_job: _QueuedJob, timeout: float) -> TokenizeResult:
        """Run a job in the fork and return the result.

        Raises:
            TimeoutError: The job took longer than `timeout` seconds, or its client disconnected.
            ConnectionError: The fork had ended before the job.
            EOFError: The fork ended during the job.
        """
        self._writer.write(processes.frame_message(queued_job.data))
        reply = asyncio.create_task(self._read_reply())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({reply, queued_job.future}, timeout=timeout, return_when=first)
            if not reply.done():
                raise TimeoutError
            return reply.result()
        finally:
            reply.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError):
                await reply

    def end(self) -> None:
        """Close the channel and kill the fork."""
        self._writer.close()
        self._process.end_fork(self._number)

    async def _read_reply(self) -> TokenizeResult:
        return _decoder.decode(await processes.read_message(self._reader))
