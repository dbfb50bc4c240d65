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
from jpaged.serve.engine.messages import Ready
from jpaged.serve.engine.tokenizing_process import MIB, Done, Order, TokenizingProcess
from jpaged.serve.errors import ApiError, bad_field, error_of, failed, not_serving, say, too_long

_MOST_COUNTED = 65536
"""Tokens that `/tokenize` always counts, however short the model's context is."""

MAX_SHORT = 16 * 1024
"""Bytes of an order up to which it is for the lane of short ones: tens of milliseconds."""

_QUICK = 0.25
"""CPU seconds after which an order counts as long, whatever its size."""

_END = 32
"""Tokens of a prompt's end, one a byte in some vocabularies."""

_MAX_TRIES = 4
"""Tries of an order whose fork turns out to have ended before."""

MAX_VERDICTS = 1024
"""Trials of forms whose results are remembered, whether the form passed or was refused."""

SPENT_SECONDS = 60.0
"""Seconds for which the result is remembered of a trial that took too much: how much it takes
depends on what else the machine does."""

_OWN_SIGNALS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP}
)
"""Signals by which an order ends its own fork: limits of time, stack and memory. Any other signal
comes from outside, such as SIGKILL when the machine's memory runs out."""

_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(Done)


class Tokenizing:
    """Tokenises for the server.

    Args:
        tokenizer: The model's, for the text of single tokens.
        process: Encodes and decodes texts.
        info: What the engine says of the model.
        text_timeout: Seconds for one text or conversation.
    """

    def __init__(
        self, tokenizer: Tokenizer, process: TokenizingProcess, info: Ready, text_timeout: float
    ):
        self.max_model_len, self._vocab_size = info.max_model_len, info.vocab_size
        self._tokenizer = tokenizer
        self._longest = max(map(len, tokenizer.hf_tokenizer.get_vocab()))  # of all tokens' texts
        self._pool = TokenizingWorkers(process, text_timeout)
        self._trials = TokenizingWorkers(process, text_timeout, max_short=None)
        # By the digest of the order, with the time it was done.
        self._verdicts: OrderedDict[bytes, tuple[Done, float]] = OrderedDict()
        self._trying: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()

    async def check_template(self) -> None:
        """Raise ValueError if the server's template is none; some messages it may well refuse."""
        done = await self._pool.do(Order(messages=[{"role": "user", "content": "a"}]))
        if done.mistake is not None:
            raise ValueError(f"--chat-template is no Jinja template ({done.mistake})")

    async def check_tools(self) -> None:
        """Raise ValueError if the template leaves out tools; some it may well refuse."""
        said = [{"role": "user", "content": "a"}]
        function = {"name": "a", "description": "a", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        without = await self._pool.do(Order(messages=said))
        having = await self._pool.do(Order(messages=said, options={"tools": tools}))
        if without.token_ids and without.token_ids == having.token_ids:
            raise ValueError(
                "--enable-auto-tool-choice: the model's chat template writes no tools; give one "
                "that does with --chat-template, or leave the flag out"
            )

    async def prompt_ids(
        self, prompt: list[int] | Order, path: str, max_tokens: int | None, keep: int | None
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
        most = self.max_model_len
        room = most - max(max_tokens or 0, 1)
        kept = None if keep is None else room if keep == -1 else keep
        if isinstance(prompt, list):
            ids = self._known(prompt, path)
        else:
            last = None if kept is None else max(min(kept, most), 1)
            ids = (await self._done(replace(prompt, last=last, most=most), path)).token_ids
        if kept is not None and room > 0:
            ids = ids[-kept:]
        if not ids:
            raise bad_field(path, "has no tokens", remedy="give at least one")
        if len(ids) >= most:
            raise self._too_long(path, errors.counted(len(ids), "token"))
        if len(ids) > room:
            raise too_long(
                "max_tokens",
                f"and the {errors.counted(len(ids), 'token')} of ",
                path,
                f" are more than this model's maximum context length of {most} tokens",
                value=f"{max_tokens}",
                remedy=("lower ", "max_tokens", f" to {most - len(ids)}, or shorten the prompt"),
            )
        return ids

    async def tokenized(self, order: Order, path: str) -> Done:
        """The tokens of a text or a conversation, which may be longer than the model's context.

        Raises:
            ApiError: it is not acceptable.
        """
        most = max(4 * self.max_model_len, _MOST_COUNTED)
        return await self._done(replace(order, most=most), path)

    async def check_form(self, form: StructuredOutputs, path: str, client: str) -> None:
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
        done = await self._verdict(Order(form=form), client)
        if done.spent is not None:
            problem = f"cannot be enforced: trying it took more than {GrammarTrial.most}"
            raise bad_field(path, problem, remedy="simplify it")
        if done.refused is not None:
            raise error_of(done.refused.renamed({f"structured_outputs.{form.kind}": path}))
        if done.failed is not None:
            say(f"compiling a grammar failed: {done.failed}")
            raise failed()

    async def _verdict(self, order: Order, client: str) -> Done:
        """Return the result of a trial, which is remembered unless an unforeseen error ended it."""
        digest = hashlib.sha256(_encoder.encode(order)).digest()
        # Concurrent requests of one client with the same spec share one trial.
        lock = self._trying.setdefault((client, digest), asyncio.Lock())
        async with lock:
            done, since = self._verdicts.get(digest, (None, 0.0))
            is_old = time.monotonic() - since >= SPENT_SECONDS
            if done is None or (is_old and done.spent is not None):
                done, since = await self._trials.do(order, client), time.monotonic()
            if done.failed is None:
                self._verdicts[digest] = done, since
                self._verdicts.move_to_end(digest)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            return done

    async def decode(self, token_ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: the model does not have one of them.
        """
        known = self._known(token_ids, "tokens")
        return (await self._done(Order(token_ids=known), "tokens")).text

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by their text."""
        decode = self._tokenizer.decode
        return {decode([token_id]): token_id for token_id in self._tokenizer.special_token_ids}

    def text_end(self, token_ids: list[int]) -> str:
        """The end of a prompt's text, which shows whether it has begun an answer's reasoning."""
        return self._tokenizer.decode(token_ids[-_END:])

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self._tokenizer.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Its bytes, of which several tokens may have those of one character; as far as the
        tokenizer tells, else those of its text."""
        of = self._tokenizer.bytes_of
        return self.token_text(token_id).encode() if of is None else of(token_id)

    def num_characters(self, token_id: int) -> int:
        """How many characters begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token_id))

    def close(self) -> None:
        """Drop what is under way."""
        self._pool.close()
        self._trials.close()

    async def _done(self, order: Order, path: str) -> Done:
        """The result of an order, which is refused here if it has too many characters."""
        texts = [each["content"] for each in order.messages or ()] or [order.text or ""]
        num_characters = sum(map(len, texts))
        if order.last is None and num_characters > self.max_model_len * self._longest:
            raise self._too_long(path, f"{num_characters} characters")
        try:
            done = await self._pool.do(order)
        except OverflowError:
            problem = "has a number that is too large for a chat template"
            done = Done(refused=ErrorInfo(path, (problem,)))
        except (OSError, RuntimeError, ValueError) as error:
            done = Done(failed=repr(error))
        if done.failed is not None:
            say(f"tokenising failed: {done.failed}")
            raise failed()
        if done.spent is not None:
            problem = f"the chat template, or tokenising, took {done.spent}: send less"
            raise bad_field(path, problem, shows_path=False)
        if done.refused is not None:
            if done.refused.path:
                raise ApiError(400, done.refused)
            raise bad_field(path, str(done.refused), shows_path=False)
        if done.is_longer:
            raise self._too_long(path, f"more than {errors.counted(order.most or 0, 'token')}")
        return done

    def _known(self, token_ids: list[int], path: str) -> list[int]:
        if token_ids and (worst := max(token_ids)) >= self._vocab_size:
            known = f"known are 0 to {self._vocab_size - 1}"
            raise bad_field(path, f"has the token id {worst}, which is unknown; {known}")
        return token_ids

    def _too_long(self, path: str, length: str) -> ApiError:
        return too_long(
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
        self, process: TokenizingProcess, seconds: float, max_short: int | None = MAX_SHORT
    ):
        self._process, self._seconds, self._max_short = process, seconds, max_short
        self._short, self._long = _Queue(), _Queue()
        self._changed = asyncio.Event()
        self._lanes = [asyncio.create_task(self._work(takes_long=it)) for it in (False, True)]

    async def do(self, order: Order, client: str = "") -> Done:
        """The result of an order.

        Raises:
            ApiError: it could not be done for now.
            OSError, RuntimeError, ValueError: there is no process for it.
        """
        data = _encoder.encode(order)
        answer = asyncio.get_running_loop().create_future()
        is_long = self._max_short is not None and len(data) > self._max_short
        self._put(_Piece(data, client, answer, is_long, is_trial=order.form is not None))
        return await answer

    def close(self) -> None:
        """End the forks and drop what is to be done."""
        for lane in self._lanes:
            lane.cancel()

    async def _work(self, *, takes_long: bool) -> None:
        fork: _Fork | None = None
        try:
            while True:
                piece = await self._next(takes_long=takes_long)
                try:
                    fork = fork or await _Fork.make(self._process, 0 if takes_long else _QUICK)
                    done = await fork.do(piece, self._seconds)
                except Exception as error:  # whatever it is, the lane goes on
                    code = None
                    if fork is not None:
                        if isinstance(error, EOFError):
                            code = await fork.exit_code(self._seconds)
                        fork.end()
                        fork = None
                    self._give_up(piece, error, code, was_quick=not takes_long)
                else:
                    if not piece.answer.done():
                        piece.answer.set_result(done)
        finally:
            if fork is not None:
                fork.end()

    async def _next(self, *, takes_long: bool) -> "_Piece":
        while True:
            piece = (self._long.take() if takes_long else None) or self._short.take()
            if piece is not None:
                return piece
            self._changed.clear()
            await self._changed.wait()

    def _give_up(
        self, piece: "_Piece", error: Exception, code: int | None, *, was_quick: bool
    ) -> None:
        """Queue an unfinished order again, or end it with an error for its client.

        Args:
            piece: The unfinished order.
            error: EOFError if the fork ended during the order.
            code: Exit code of the fork; None if unknown, for example if the whole process ended.
            was_quick: Whether the fork was limited to `_QUICK` CPU seconds.
        """
        if piece.answer.done():
            return
        piece.num_tries += 1
        if was_quick and code == -signal.SIGPROF:
            piece.is_long = True
            self._put(piece)
        elif isinstance(error, ConnectionError) or (isinstance(error, EOFError) and code is None):
            if piece.num_tries < _MAX_TRIES:
                self._put(piece)
            else:
                piece.answer.set_exception(_ended(f"ended {piece.num_tries} times"))
        elif isinstance(error, TimeoutError) and piece.is_trial:  # it had little of a processor
            words = f"trying the schema took longer than {self._seconds:g} seconds: retry"
            piece.answer.set_exception(not_serving(words, 1))
        elif isinstance(error, TimeoutError):
            words = f"longer than the limit of {self._seconds:g} seconds"
            piece.answer.set_result(Done(spent=words))
        elif code is not None and code < 0 and -code not in _OWN_SIGNALS:
            piece.answer.set_exception(_ended(f"was killed ({signal.Signals(-code).name})"))
        elif code is not None and code >= 0:  # no limit ends a fork in this way
            piece.answer.set_exception(_ended(f"ended with code {code}"))
        elif isinstance(error, EOFError):  # what is not Python's ends when memory does
            most = self._process.settings.max_memory // MIB
            piece.answer.set_result(Done(spent=f"more than the limit of {most} MiB of memory"))
        else:
            piece.answer.set_exception(error)

    def _put(self, piece: "_Piece") -> None:
        (self._long if piece.is_long else self._short).put(piece)
        self._changed.set()


def _ended(how: str) -> ApiError:
    return not_serving(f"the tokenizer worker {how}: retry", 1)


@dataclass(eq=False)
class _Piece:
    """An order that waits or is worked on."""

    data: bytes
    client: str
    answer: asyncio.Future[Done]
    is_long: bool
    is_trial: bool
    num_tries: int = 0


class _Queue:
    """Orders that wait."""

    def __init__(self):
        self._of_client: OrderedDict[str, deque[_Piece]] = OrderedDict()

    def put(self, piece: _Piece) -> None:
        """Add an order behind the others of its client."""
        self._of_client.setdefault(piece.client, deque()).append(piece)

    def take(self) -> _Piece | None:
        """Remove and return the next order that a client still waits for; None if there is none."""
        while self._of_client:
            client, pieces = self._of_client.popitem(last=False)
            piece = pieces.popleft()
            if pieces:
                self._of_client[client] = pieces  # now the last client in turn
            if not piece.answer.done():
                return piece
        return None


class _Fork:
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
    async def make(cls, process: TokenizingProcess, most_seconds: float) -> "_Fork":
        seen = process.num_starts
        try:
            number, sock = process.fork(most_seconds)
        except ConnectionError:
            await asyncio.to_thread(process.revive, seen)
            number, sock = process.fork(most_seconds)
        return cls(process, number, *await asyncio.open_unix_connection(sock=sock))

    async def exit_code(self, seconds: float) -> int | None:
        """Return the fork's exit code after its connection closed.

        Returns:
            None if the code is unknown after `seconds`: the parent of the fork has ended too.
        """
        try:
            sock = self._process.ask_exit_code(self._number)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            try:
                reply = await asyncio.wait_for(processes.read(reader), seconds)
                return msgspec.msgpack.decode(reply, type=int | None)
            finally:
                writer.close()
        except (OSError, EOFError):  # TimeoutError is an OSError
            return None

    async def do(self, piece: _Piece, seconds: float) -> Done:
        """The result of a piece.

        Raises:
            TimeoutError: it took too long, or its client has gone.
            ConnectionError: the fork had ended before.
            EOFError: the fork ended meanwhile.
        """
        self._writer.write(processes.framed(piece.data))
        reply = asyncio.create_task(self._reply())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({reply, piece.answer}, timeout=seconds, return_when=first)
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

    async def _reply(self) -> Done:
        return _decoder.decode(await processes.read(self._reader))
