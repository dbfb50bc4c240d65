"""Text to tokens and back, and trials of schemas, in forks of a process of their own.

Short texts never wait for long ones, texts never wait for trials, and a fork whose work no client
waits for is ended.
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
"""Tokens that `/tokenize` always counts, however short the model's context is."""

MAX_SHORT_JOB_BYTES = 16 * 1024
"""Bytes of an order up to which it is for the lane of short ones: tens of milliseconds."""

_SHORT_JOB_CPU_S = 0.25
"""CPU seconds after which an order counts as long, whatever its size."""

_NUM_PROMPT_END_TOKENS = 32
"""Tokens of a prompt's end, one a byte in some vocabularies."""

_MAX_TRIES = 4
"""Tries of an order whose fork turns out to have ended before."""

MAX_TRIAL_RESULTS = 1024
"""Trials of forms whose results are remembered, whether the form passed or was refused."""

LIMIT_ERROR_TTL_S = 60.0
"""Seconds for which the result is remembered of a trial that took too much: how much it takes
depends on what else the machine does."""

_LIMIT_SIGNALS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP}
)
"""Signals by which an order ends its own fork: limits of time, stack and memory. Any other signal
comes from outside, such as SIGKILL when the machine's memory runs out."""

_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(TokenizeResult)


class TokenizingService:
    """Tokenises for the server.

    Args:
        tokenizer: The model's, for the text of single tokens.
        process: Encodes and decodes texts.
        info: What the engine says of the model.
        text_timeout: Seconds for one text or conversation.
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
        self._max_token_characters = max(
            map(len, tokenizer.hf_tokenizer.get_vocab())
        )  # of all tokens' texts
        self._workers = TokenizingWorkers(process, text_timeout)
        self._trial_workers = TokenizingWorkers(process, text_timeout, max_short_bytes=None)
        # By the digest of the order, with the time it was done.
        self._trial_results: OrderedDict[bytes, tuple[TokenizeResult, float]] = OrderedDict()
        self._trial_locks: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = (
            WeakValueDictionary()
        )

    async def check_template(self) -> None:
        """Raise ValueError if the server's template is none; some messages it may well refuse."""
        result = await self._workers.run_job(
            TokenizeJob(messages=[{"role": "user", "content": "a"}])
        )
        if result.template_error is not None:
            raise ValueError(f"--chat-template is no Jinja template ({result.template_error})")

    async def check_tools(self) -> None:
        """Raise ValueError if the template leaves out tools; some it may well refuse."""
        messages = [{"role": "user", "content": "a"}]
        function = {"name": "a", "description": "a", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        without_tools = await self._workers.run_job(TokenizeJob(messages=messages))
        with_tools = await self._workers.run_job(
            TokenizeJob(messages=messages, options={"tools": tools})
        )
        if without_tools.token_ids and without_tools.token_ids == with_tools.token_ids:
            raise ValueError(
                "--enable-auto-tool-choice: the model's chat template writes no tools; give one "
                "that does with --chat-template, or leave the flag out"
            )

    async def prompt_ids(
        self, prompt: list[int] | TokenizeJob, path: str, max_tokens: int | None, keep: int | None
    ) -> list[int]:
        """The token ids of a prompt that fits the model together with an answer.

        Args:
            prompt: Token ids, or what to tokenise.
            path: What errors call it.
            max_tokens: The answer's; None for as many as there is room for, at least one.
            keep: Cut the prompt to its last so many tokens; -1: to what there is room for.

        Raises:
            ApiError: it is not acceptable, or does not fit.
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
            raise field_error(path, "has no tokens", remedy="give at least one")
        if len(ids) >= max_num_tokens:
            raise self._too_long_error(path, errors.format_count(len(ids), "token"))
        if len(ids) > max_prompt_tokens:
            raise context_length_error(
                "max_tokens",
                f"and the {errors.format_count(len(ids), 'token')} of ",
                path,
                f" are more than this model's maximum context length of {max_num_tokens} tokens",
                value=f"{max_tokens}",
                remedy=(
                    "lower ",
                    "max_tokens",
                    f" to {max_num_tokens - len(ids)}, or shorten the prompt",
                ),
            )
        return ids

    async def tokenize(self, job: TokenizeJob, path: str) -> TokenizeResult:
        """The tokens of a text or a conversation, which may be longer than the model's context.

        Raises:
            ApiError: it is not acceptable.
        """
        max_num_tokens = max(4 * self.max_model_len, _MIN_TOKENIZE_LIMIT)
        return await self._run_job(replace(job, max_num_tokens=max_num_tokens), path)

    async def check_spec(self, spec: StructuredOutputs, path: str, client: str) -> None:
        """Try a structured-output spec in a fork, unless the result of a trial is remembered.

        Args:
            form: The structured-output spec. If it exceeds a limit or crashes the fork, only this
                request fails.
            path: Name of the field in errors.
            client: Clients take turns in trials.

        Raises:
            ApiError: the spec has no grammar or exceeds a limit; 503 if the fork was killed from
                outside.
        """
        result = await self._run_trial(TokenizeJob(spec=spec), client)
        if result.exceeded_limit is not None:
            problem = f"cannot be enforced: trying it took more than {GrammarTrial.most}"
            raise field_error(path, problem, remedy="simplify it")
        if result.job_error is not None:
            raise error_from_info(
                result.job_error.with_renamed_fields({f"structured_outputs.{spec.kind}": path})
            )
        if result.internal_error is not None:
            log_line(f"compiling a grammar failed: {result.internal_error}")
            raise internal_error()

    async def _run_trial(self, job: TokenizeJob, client: str) -> TokenizeResult:
        """Return the result of a trial, which is remembered unless an unforeseen error ended it."""
        digest = hashlib.sha256(_encoder.encode(job)).digest()
        # Concurrent requests of one client with the same spec share one trial.
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
        """The text of tokens.

        Raises:
            ApiError: the model does not have one of them.
        """
        known = self._check_token_ids(token_ids, "tokens")
        return (await self._run_job(TokenizeJob(token_ids=known), "tokens")).text

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by their text."""
        decode = self._tokenizer.decode
        return {decode([token_id]): token_id for token_id in self._tokenizer.special_token_ids}

    def text_end(self, token_ids: list[int]) -> str:
        """The end of a prompt's text, which shows whether it has begun an answer's reasoning."""
        return self._tokenizer.decode(token_ids[-_NUM_PROMPT_END_TOKENS:])

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self._tokenizer.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Its bytes, of which several tokens may have those of one character; as far as the
        tokenizer tells, else those of its text."""
        get_token_bytes = self._tokenizer.token_bytes
        return (
            self.token_text(token_id).encode()
            if get_token_bytes is None
            else get_token_bytes(token_id)
        )

    def num_characters(self, token_id: int) -> int:
        """How many characters begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token_id))

    def close(self) -> None:
        """Drop what is under way."""
        self._workers.close()
        self._trial_workers.close()

    async def _run_job(self, job: TokenizeJob, path: str) -> TokenizeResult:
        """The result of an order, which is refused here if it has too many characters."""
        texts = [each["content"] for each in job.messages or ()] or [job.text or ""]
        num_characters = sum(map(len, texts))
        if job.last is None and num_characters > self.max_model_len * self._max_token_characters:
            raise self._too_long_error(path, f"{num_characters} characters")
        try:
            result = await self._workers.run_job(job)
        except OverflowError:
            problem = "has a number that is too large for a chat template"
            result = TokenizeResult(job_error=ErrorInfo(path, (problem,)))
        except (OSError, RuntimeError, ValueError) as error:
            result = TokenizeResult(internal_error=repr(error))
        if result.internal_error is not None:
            log_line(f"tokenising failed: {result.internal_error}")
            raise internal_error()
        if result.exceeded_limit is not None:
            problem = f"the chat template, or tokenising, took {result.exceeded_limit}: send less"
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
            known = f"known are 0 to {self._vocab_size - 1}"
            raise field_error(path, f"has the token id {worst}, which is unknown; {known}")
        return token_ids

    def _too_long_error(self, path: str, length: str) -> ApiError:
        return context_length_error(
            path,
            f"has {length}, too many for this model's maximum context length of "
            f"{self.max_model_len} tokens, the answer's included",
            remedy="shorten it",
        )


class TokenizingWorkers:
    """Two forks of the tokenizing process, and the orders that wait for them.

    One fork does short orders and gives up those that turn out not to be short. The other fork does
    long orders, and short ones while there are none. Clients take turns, and the orders of one
    client are done as they came. An order whose client has gone is dropped; the fork that works on
    it ends, and a new one takes its place.

    Args:
        process: The tokenizing process; it may be another pool's too.
        seconds: For one order.
        max_short: Bytes up to which an order counts as short at first; None for no bound.
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
        """The result of an order.

        Raises:
            ApiError: it could not be done for now.
            OSError, RuntimeError, ValueError: there is no process for it.
        """
        data = _encoder.encode(job)
        future = asyncio.get_running_loop().create_future()
        is_long = self._max_short_bytes is not None and len(data) > self._max_short_bytes
        self._enqueue(_QueuedJob(data, client, future, is_long, is_trial=job.spec is not None))
        return await future

    def close(self) -> None:
        """End the forks and drop what is to be done."""
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
                except Exception as error:  # whatever it is, the lane goes on
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
        """Queue an unfinished order again, or end it with an error for its client.

        Args:
            piece: The unfinished order.
            error: EOFError if the fork ended during the order.
            code: Exit code of the fork; None if unknown, for example if the whole process ended.
            was_quick: Whether the fork was limited to `_SHORT_JOB_CPU_S` CPU seconds.
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
        elif (
            isinstance(error, TimeoutError) and queued_job.is_trial
        ):  # it had little of a processor
            words = f"trying the schema took longer than {self._timeout:g} seconds: retry"
            queued_job.future.set_exception(unavailable_error(words, 1))
        elif isinstance(error, TimeoutError):
            words = f"longer than the limit of {self._timeout:g} seconds"
            queued_job.future.set_result(TokenizeResult(exceeded_limit=words))
        elif code is not None and code < 0 and -code not in _LIMIT_SIGNALS:
            queued_job.future.set_exception(
                _worker_error(f"was killed ({signal.Signals(-code).name})")
            )
        elif code is not None and code >= 0:  # no limit ends a fork in this way
            queued_job.future.set_exception(_worker_error(f"ended with code {code}"))
        elif isinstance(error, EOFError):  # what is not Python's ends when memory does
            most = self._process.settings.max_memory // MIB
            queued_job.future.set_result(
                TokenizeResult(exceeded_limit=f"more than the limit of {most} MiB of memory")
            )
        else:
            queued_job.future.set_exception(error)

    def _enqueue(self, queued_job: "_QueuedJob") -> None:
        (self._long_jobs if queued_job.is_long else self._short_jobs).put(queued_job)
        self._changed.set()


def _worker_error(reason: str) -> ApiError:
    return unavailable_error(f"the tokenizer worker {reason}: retry", 1)


@dataclass(eq=False)
class _QueuedJob:
    """An order that waits or is worked on."""

    data: bytes
    client: str
    future: asyncio.Future[TokenizeResult]
    is_long: bool
    is_trial: bool
    num_tries: int = 0


class _FairQueue:
    """Orders that wait."""

    def __init__(self):
        self._jobs_by_client: OrderedDict[str, deque[_QueuedJob]] = OrderedDict()

    def put(self, queued_job: _QueuedJob) -> None:
        """Add an order behind the others of its client."""
        self._jobs_by_client.setdefault(queued_job.client, deque()).append(queued_job)

    def take(self) -> _QueuedJob | None:
        """Remove and return the next order that a client still waits for; None if there is none."""
        while self._jobs_by_client:
            client, queued_jobs = self._jobs_by_client.popitem(last=False)
            queued_job = queued_jobs.popleft()
            if queued_jobs:
                self._jobs_by_client[client] = queued_jobs  # now the last client in turn
            if not queued_job.future.done():
                return queued_job
        return None


class _ForkConnection:
    """A fork of the tokenizing process, and the line to it."""

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
        """Return the fork's exit code after its connection closed.

        Returns:
            None if the code is unknown after `timeout`: the parent of the fork has ended too.
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
        """The result of a piece.

        Raises:
            TimeoutError: it took too long, or its client has gone.
            ConnectionError: the fork had ended before.
            EOFError: the fork ended meanwhile.
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
        """End it, whatever it does."""
        self._writer.close()
        self._process.end_fork(self._number)

    async def _read_reply(self) -> TokenizeResult:
        return _decoder.decode(await processes.read_message(self._reader))
