"""What answers may go on with, made in a process of its own: this runs there (`main`).

The process compiles grammars, matches tokens and makes masks, and shares memory with the engine,
which sees it as `mask_process.MaskProcess`. llguidance takes some 15 us for most masks, and 1 to
2 ms, a walk through the whole vocabulary, for some that allow many tokens: where a string of
bounded length has room for fewer letters than a token may have. Such a state follows one that
allows many tokens, too: these masks are made one by one in threads, all others together.
"""

import gc
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import msgspec
import numpy as np

from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.text.grammar import GrammarError, Grammars, Matcher
from jpaged.text.tokenizer import Tokenizer

HEAD = struct.Struct("=BII")
"""Of a message to the process: its `Kind`, how many answers it is of, and the bytes that follow."""

_MOST_THREADS = 16
"""That make masks one by one."""

_MOST_TOGETHER = 8
"""Threads of llguidance's, for masks that are made together."""

_STRIDE = 64
"""Of a mask's words, each so-manieth tells whether it allows many tokens."""

_TEXT = 2048
"""Bytes of an error."""


class Settings(msgspec.Struct, frozen=True):
    """What the process needs: the tokenizer's folder, the width of the logits, the model's own end
    tokens; as of `MaskMemory` the others."""

    folder: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    places: int
    mask_width: int


class Order(msgspec.Struct, frozen=True):
    """A form to be compiled for answers at some places, which tokens `ending_ids` may end. The form
    was checked when it was made."""

    form: StructuredOutputs
    places: list[int]
    ending_ids: frozenset[int]


class Kind(IntEnum):
    """What a message to the process is."""

    BEGIN = 0  # an `Order`, in JSON
    TOKENS = (
        1  # int32: places of answers, their rows in a step, the tokens of its rows, -1 for none
    )
    END = 2  # int32: places of answers that are over


class State(IntEnum):
    """Of an answer's place in the memory.

    From FREE the engine makes it PENDING (`submit`) and tells the process (BEGIN). The process
    makes it MADE or FAILED when the first mask is there or cannot be; on each TOKENS PENDING or
    STOPPED, and then MADE or FAILED; and FREE on END, once no thread of its writes there. LOST is
    the engine's, when the process has ended. `counts` change after states: whoever has seen a
    step counted sees its states.
    """

    FREE = 0  # no answer has it, nor will the process write to it
    PENDING = 1  # the grammar is being compiled, or a mask made
    MADE = 2  # the mask of its next token is there
    STOPPED = 3  # nothing may follow
    FAILED = 4  # why is written there
    LOST = 5  # the process has ended


class MaskMemory:
    """The memory that the engine and the process share: a place an answer. Pages that nothing was
    written to take no memory.

    Place 0 is no answer's: its mask allows all. Who writes to a place: the engine while it is FREE;
    then the process, until it is again.

    Attributes:
        counts: int64 [3]: steps whose tokens are taken in, nanoseconds that took, nanoseconds that
            making masks together took.
        states: int32 [places], each a `State`.
        masks: int32 [places, W], token `32 w + j` is bit `j` of word `w`.

    Args:
        places: How many.
        mask_width: W.
        file: The file descriptor of the memory; None makes one.
    """

    def __init__(self, places: int, mask_width: int, file: int | None = None):
        page = mmap.PAGESIZE
        sizes = [page, 4 * places, _TEXT * places, 4 * mask_width * places]
        starts = np.cumsum([0, *(-(-size // page) * page for size in sizes)]).tolist()
        self.file = os.memfd_create("jpaged-masks") if file is None else file
        if file is None:
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, starts[-1])
        memory = mmap.mmap(self.file, starts[-1])

        def part(i: int, dtype: Any, *shape: int) -> np.ndarray:
            found = np.frombuffer(memory, dtype, int(np.prod(shape)), starts[i])
            return found.reshape(shape)

        self.counts = part(0, np.int64, 3)
        self.states = part(1, np.int32, places)
        self._texts = part(2, np.uint8, places, _TEXT)
        self.masks = part(3, np.int32, places, mask_width)
        if file is None:
            self.masks[0] = -1

    def fail(self, place: int, error: BaseException) -> None:
        """Say that an answer fails, and why."""
        text = str(error).encode(errors="replace")[: _TEXT - 1]
        self._texts[place, : len(text) + 1] = np.frombuffer(text + b"\0", np.uint8)
        self.states[place] = State.FAILED

    def error(self, place: int) -> GrammarError:
        """Why an answer fails."""
        if self.states[place] == State.LOST:
            return GrammarError(
                "structured_outputs: the process that compiles grammars and makes masks has ended; "
                "it is started again for the next request: retry"
            )
        text = self._texts[place].tobytes().partition(b"\0")[0]
        return GrammarError(text.decode(errors="ignore"))


class _Answer:
    """An answer, as the process has it."""

    __slots__ = ("is_busy", "is_over", "is_wide", "matcher", "place")

    def __init__(self, place: int):
        self.place = place
        self.matcher: Any = None  # a Matcher, as soon as the grammar is compiled
        self.is_wide = False  # its last mask allowed many tokens
        self.is_busy = True  # a thread will write to its place
        self.is_over = False


class MaskMaker:
    """Matches answers and makes their masks. Its methods are called by one thread.

    Args:
        memory: Where the masks go.
        tell: Called, by any thread, when something in it has changed.
        num_cpus: Processors that there are; one less is used, if there are so many.

    Attributes:
        answers: By their places.
    """

    def __init__(self, memory: MaskMemory, tell: Callable[[], None], num_cpus: int):
        from llguidance import LLExecutor

        self._memory, self._tell = memory, tell
        self.answers: dict[int, _Answer] = {}
        self._lock = threading.Lock()  # for what threads and `end` both look at
        self._executor = LLExecutor(max(1, min(_MOST_TOGETHER, num_cpus - 1)))
        self._alone: SimpleQueue[_Answer] = SimpleQueue()  # whose masks are made one by one
        for _ in range(max(2, min(_MOST_THREADS, num_cpus - 1))):
            threading.Thread(target=self._make_alone, daemon=True).start()

    def begin(self, places: Sequence[int], compiled: Future[list[Matcher]]) -> None:
        """Have answers at some places, whose matchers are being compiled."""
        answers = [_Answer(place) for place in places]
        self.answers |= {it.place: it for it in answers}
        compiled.add_done_callback(partial(self._give_matchers, answers))

    def take(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Take in a token each of some answers, below 0 for none, and make the masks behind them.

        Args:
            places, tokens: int32 [n].
        """
        start, states = time.perf_counter_ns(), self._memory.states
        answers = self.answers  # without those that a process before this one lost
        pairs = zip(places.tolist(), tokens.tolist(), strict=True)
        items = [(answers[it], token) for it, token in pairs if token >= 0 and it in answers]
        together = [item for item in items if item[0].matcher.is_matched(item[1])]
        errors: dict[int, BaseException] = {}
        for answer, token in items if len(together) < len(items) else ():
            if not answer.matcher.is_matched(token):
                try:
                    answer.matcher.accept(token)
                except BaseException as error:  # a panic in Rust is no Exception
                    errors[answer.place] = error
        if together:
            errors |= self._consume(together)
        left = [answer for answer, _ in items if answer.place not in errors]
        for place, error in errors.items():
            self._fail(self.answers[place], error)
        found = [State.STOPPED if it.matcher.is_stopped else State.PENDING for it in left]
        states[[it.place for it in left]] = found
        taken = time.perf_counter_ns()
        self._memory.counts[:2] += 1, taken - start
        self._tell()
        self._make([it for it in left if not it.matcher.is_stopped])
        self._memory.counts[2] += time.perf_counter_ns() - taken

    def end(self, places: np.ndarray) -> None:
        """Some answers are over; their places are FREE as soon as no thread writes to them."""
        for place in places.tolist():
            answer = self.answers.pop(place, None)
            with self._lock:
                if answer is None or not answer.is_busy:
                    self._memory.states[place] = State.FREE
                else:
                    answer.is_over = True

    def _consume(self, items: Sequence[tuple[_Answer, int]]) -> dict[int, BaseException]:
        """Let llguidance take in tokens; what went wrong, by places."""
        try:
            inner = [(answer.matcher.inner, token) for answer, token in items]
            allowed = self._executor.consume_token_par(inner)
            found = [
                (answer.place, answer.matcher.outcome(token, is_allowed))
                for (answer, token), is_allowed in zip(items, allowed, strict=True)
            ]
        except BaseException as error:
            return {answer.place: error for answer, _ in items}
        return {place: error for place, error in found if error is not None}

    def _make(self, answers: Sequence[_Answer]) -> None:
        """Make masks: those that are likely to be quick together, the others in threads."""
        for answer in answers:
            answer.is_wide |= answer.matcher.needs_lexer  # a thread compiles the grammar again
        quick = [it for it in answers if not it.is_wide]
        for answer in answers if len(quick) < len(answers) else ():
            if answer.is_wide:
                answer.is_busy = True
                self._alone.put(answer)
        if not quick:
            return
        start = time.perf_counter()
        try:
            errors = self._fill_together(quick)
        except BaseException as error:
            errors = {answer.place: error for answer in quick}
        # Some answer may take too long. Which one is seen the next time.
        if time.perf_counter() - start > bounds.MASK_SECONDS:
            for answer in quick:
                answer.is_wide = True
        for answer in quick:
            if answer.place in errors:
                self._fail(answer, errors[answer.place])
        left = [it for it in quick if it.place not in errors]
        made = [it.place for it in left if not it.matcher.needs_lexer]
        self._memory.states[made] = State.MADE
        self._tell()
        if len(made) < len(left):
            self._make([it for it in left if it.matcher.needs_lexer])

    def _fill_together(self, answers: Sequence[_Answer]) -> dict[int, BaseException]:
        """Write the masks of some answers; what went wrong, by places."""
        from llguidance.numpy import fill_next_token_bitmask_par

        masks, places = self._memory.masks, np.array([it.place for it in answers])
        bound = [(it.matcher.inner, it.place) for it in answers if not it.matcher.is_free]
        if bound:
            fill_next_token_bitmask_par(self._executor, bound, masks)
        errors: dict[int, BaseException] = {}
        have_eos = answers[0].matcher.tokens.have_eos(masks, places).tolist()
        for answer, has_eos in zip(answers, have_eos, strict=True):
            matcher: Matcher = answer.matcher
            if has_eos or not matcher.is_begun or matcher.inner.is_error():  # few
                error = matcher.widen(masks[answer.place])
                if error is not None:
                    errors[answer.place] = error
        some = masks[:, ::_STRIDE][places]
        are_wide = 2 * np.count_nonzero(some, axis=1) > some.shape[1]
        for answer, is_wide in zip(answers, are_wide.tolist(), strict=True):
            answer.is_wide = is_wide
        return errors

    def _give_matchers(self, answers: Sequence[_Answer], compiled: Future[list[Matcher]]) -> None:
        """The grammar of some answers is compiled, or cannot be: their first masks follow."""
        if (error := compiled.exception()) is not None:
            for answer in answers:
                self._settle(answer, error)
            return
        for answer, matcher in zip(answers, compiled.result(), strict=True):
            answer.matcher = matcher
            self._alone.put(answer)

    def _make_alone(self) -> None:
        """Make masks one by one; some that take a processor too long fail."""
        masks = self._memory.masks
        while True:
            answer = self._alone.get()
            start = time.thread_time()
            try:
                error = answer.matcher.fill(masks, answer.place)
                is_slow = time.thread_time() - start > bounds.MASK_SECONDS
                if is_slow and answer.is_wide:  # not where it is the first
                    error = answer.matcher.too_slow()
                some = masks[answer.place, ::_STRIDE]
                answer.is_wide = is_slow or bool(2 * np.count_nonzero(some) > len(some))
            except BaseException as found:
                error = found
            self._settle(answer, error)
            answer = error = None  # no thread that waits keeps an answer's lexer

    def _settle(self, answer: _Answer, error: BaseException | None) -> None:
        """A thread has done with an answer."""
        with self._lock:
            answer.is_busy = False
            if answer.is_over:
                self._memory.states[answer.place] = State.FREE
            elif error is None:
                self._memory.states[answer.place] = State.MADE
            else:
                self._fail(answer, error)
        self._tell()

    def _fail(self, answer: _Answer, error: BaseException) -> None:
        if not isinstance(error, GrammarError) and answer.matcher is not None:
            error = answer.matcher.failed(error)
        self._memory.fail(answer.place, error)


def frame(kind: Kind, content: bytes, count: int = 0) -> bytes:
    """A message to the process, of so many answers."""
    return HEAD.pack(kind, count, len(content)) + content


def main(line: int, file: int) -> None:
    """Do what the engine says over a socket, until it is gone. Never returns.

    The first message is the `Settings`, in JSON. Back comes a byte whenever something in the memory
    has changed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine's, which may drain first
    os.dup2(2, 1)  # a program's own output is not for what libraries print here
    sys.setswitchinterval(0.0005)  # masks wait no longer for the Python of threads that compile
    with suppress(OSError):  # where memory is short, rather this process than the engine's
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    sock = socket.socket(fileno=line)

    def tell() -> None:
        with suppress(OSError):  # the engine has gone, or has enough bytes to read
            sock.send(b"!", socket.MSG_DONTWAIT)

    try:
        _obey(sock.makefile("rb"), file, tell)
    except (EOFError, ConnectionError):  # the engine has no use for this process, or is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # threads may be at work


def _obey(messages: BinaryIO, file: int, tell: Callable[[], None]) -> None:
    """Do what messages say, to their end."""
    settings = msgspec.json.decode(_receive(messages)[-1], type=Settings)
    memory = MaskMemory(settings.places, settings.mask_width, file)
    submit = _compiler(settings)
    orders = msgspec.json.Decoder(Order)
    maker = MaskMaker(memory, tell, len(os.sched_getaffinity(0)))
    gc.collect()
    gc.freeze()  # the vocabulary is not walked through again
    while True:
        kind, count, content = _receive(messages)
        if kind == Kind.TOKENS:
            found = np.frombuffer(content, np.int32)
            maker.take(found[:count], found[2 * count :][found[count : 2 * count]])
        elif kind == Kind.END:
            maker.end(np.frombuffer(content, np.int32))
        else:
            it = orders.decode(content)
            maker.begin(it.places, submit(it.form, it.ending_ids, len(it.places)))


def _compiler(settings: Settings) -> Callable[..., Future[list[Matcher]]]:
    """`Grammars.submit`, with the tokenizer loaded once more."""
    try:
        tokenizer = Tokenizer.from_folder(Path(settings.folder))
    except Exception as error:
        failed: Future[list[Matcher]] = Future()
        where = f"from {settings.folder!r} again"
        words = f"structured_outputs: no tokenizer could be loaded {where}: {error}"
        failed.set_exception(GrammarError(words))
        return lambda *_: failed
    return Grammars(tokenizer, settings.vocab_size, settings.eos_token_ids).submit


def _receive(messages: BinaryIO) -> tuple[int, int, bytes]:
    """The next message: what it is, of how many answers; EOFError at the end."""
    head = messages.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError
    kind, count, size = HEAD.unpack(head)
    return kind, count, messages.read(size)
