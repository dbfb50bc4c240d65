"""What answers may go on with, made in a process of its own: this runs there (`main`).

The process compiles grammars, matches tokens and makes masks, and shares memory with the engine,
which sees it as `mask_client.MaskWorkerClient`. llguidance takes 15 to 30 us for most masks. Some masks
take 1 to 2 ms, a walk through the whole vocabulary: those of a string of bounded length that has
room for fewer letters than a token may have. And a token may cost the matcher several milliseconds
where a grammar is ambiguous. So masks are made together until some are measured to be slow; the
answers that may have slow masks are then served one by one in threads (`_WorkerAnswer`).
"""

import faulthandler
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np

from jpaged.errors import ErrorInfo, ErrorKind, RequestError, error_info
from jpaged.processes import exit_with_parent, frame_message, receive
from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.matcher import GrammarError, Matcher, broken_matcher
from jpaged.text.tokenizer import Tokenizer

_HEADER = struct.Struct("=II")
"""The beginning of a message to the process: its `MaskMessageKind`, and how many answers it is of."""

_MAX_ANSWER_THREADS = 16
"""Maximum number of threads that make masks one by one."""

_MAX_CHUNK_ANSWERS = 16
"""Maximum number of answers in one timed call of llguidance."""

_USUAL_ITEM_S = 5e-5
"""Seconds that one thread of llguidance usually needs for one token or one mask, at most."""

_LATE_CHUNK_S = 5e-4
"""Seconds beyond the usual time of a chunk from which one of its answers counts as slow."""

_SLOW_MASK_S = 3e-4
"""CPU seconds from which a mask is slow."""

_NUM_TIMED_MASKS = 64
"""Number of masks that threads make and time one by one after a slow mask of the same grammar.

Only masks that follow one with many allowed tokens count. Then such masks are made together again.
"""

_MAX_TIMED_MASKS = 1024
"""Maximum of this number: each further slow mask adds `_NUM_TIMED_MASKS` to it."""

_HEAVY_TOKEN_S = 1e-3
"""Processor time to match one token from which an answer is heavy: the grammar is ambiguous. Other
grammars need 0.2 ms at most, ambiguous ones 4 to 8 ms."""

_HEAVY_MASK_S = 1e-2
"""Processor time for one mask from which an answer is heavy. Bounded strings need up to 3 ms."""

_MAX_BATCH_THREADS = 8
"""Threads of llguidance's, for masks that are made together."""

_MIN_SAMPLED_WORDS = 64
"""Number of a mask's words, at least, that tell whether it allows many tokens."""

_ERROR_BYTES = 2048
"""Bytes of an error."""


class MaskWorkerSettings(msgspec.Struct, frozen=True):
    """What the process needs: the tokenizer's folder, the width of the logits, the model's own end
    tokens; as of `MaskMemory` the others."""

    folder: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    capacity: int
    mask_width: int


class MaskJob(msgspec.Struct, frozen=True):
    """A form to be compiled for answers at some places, which tokens `ending_ids` may end. The form
    was checked when it was made."""

    spec: StructuredOutputs
    memory_indices: list[int]
    ending_ids: frozenset[int]


class MaskMessageKind(IntEnum):
    """What a message to the process is."""

    BEGIN = 0  # an `MaskJob`, in JSON
    TOKENS = (
        1  # int32: places of answers, their rows in a step, the tokens of its rows, -1 for none
    )
    END = 2  # int32: places of answers that are over


class AnswerState(IntEnum):
    """Of an answer's place in the memory.

    From FREE the engine makes it PENDING (`submit`) and tells the process (BEGIN). The process
    makes it MADE or FAILED when the first mask is there or cannot be. The engine makes it PENDING
    again before it sends a token (TOKENS); the process then makes it HEAVY, STOPPED, MADE or
    FAILED. The process makes it FREE on END, once no thread of its writes there. LOST is the
    engine's, when the process has ended. `counts` change after states: whoever has seen a step
    counted sees its states.
    """

    FREE = 0  # no answer has it, nor will the process write to it
    PENDING = 1  # the grammar is being compiled, a token on its way, or a mask made
    HEAVY = 2  # the same, and it takes milliseconds: no step should wait for it
    READY = 3  # the mask of its next token is there
    STOPPED = 4  # the answer is complete
    FAILED = 5  # the answer failed; the place holds the error's text
    DROPPED = 6  # the process has ended

    @property
    def is_pending(self) -> bool:
        """Whether the process will change it without being told to."""
        return self in (AnswerState.PENDING, AnswerState.HEAVY)


class MaskMemory:
    """The memory that the engine and the process share: a place an answer. Pages that nothing was
    written to take no memory.

    Place 0 is no answer's: its mask allows all. Who writes to a place: the engine while it is FREE;
    then the process, until it is again.

    Attributes:
        counts: int64 [3]: steps whose tokens are taken in, nanoseconds that took, nanoseconds that
            making masks together took.
        states: int32 [places], each a `AnswerState`.
        masks: int32 [places, W], token `32 w + j` is bit `j` of word `w`.
        lost_because: How the last mask worker ended that the engine lost.

    Args:
        places: How many.
        mask_width: W.
        file: The file descriptor of the memory; None makes one.
    """

    def __init__(self, capacity: int, mask_width: int, fd: int | None = None):
        page = mmap.PAGESIZE
        sizes = [page, 4 * capacity, _ERROR_BYTES * capacity, 4 * mask_width * capacity]
        starts = np.cumsum([0, *(-(-size // page) * page for size in sizes)]).tolist()
        self.fd = os.memfd_create("jpaged-masks") if fd is None else fd
        if fd is None:
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, starts[-1])
        memory = mmap.mmap(self.fd, starts[-1])

        def part(i: int, dtype: Any, *shape: int) -> np.ndarray:
            found = np.frombuffer(memory, dtype, int(np.prod(shape)), starts[i])
            return found.reshape(shape)

        self.counts = part(0, np.int64, 3)
        self.states = part(1, np.int32, capacity)
        self._error_texts = part(2, np.uint8, capacity, _ERROR_BYTES)
        self.masks = part(3, np.int32, capacity, mask_width)
        self.drop_reason = ""
        if fd is None:
            self.masks[0] = -1

    def write_error(self, memory_index: int, error: BaseException) -> None:
        """Say that an answer fails, and why."""
        info = error_info(error)
        if not isinstance(error, RequestError):  # unforeseen
            problem = f": {type(error).__name__}: {error}"
            info = ErrorInfo("structured_outputs", (problem,), kind=ErrorKind.INTERNAL)
        text, words = msgspec.json.encode(info), str(info)
        while len(text) >= _ERROR_BYTES:
            words = words[: len(words) * 3 // 4]
            own = ErrorInfo("structured_outputs", (words,), kind=info.kind, shows_path=False)
            text = msgspec.json.encode(own)
        self._error_texts[memory_index, : len(text) + 1] = np.frombuffer(text + b"\0", np.uint8)
        self.states[memory_index] = AnswerState.FAILED

    def read_error(self, memory_index: int) -> GrammarError:
        """Why an answer fails."""
        if self.states[memory_index] == AnswerState.DROPPED:
            return GrammarError(
                "structured_outputs",
                ": the process that compiles grammars and makes masks has ended "
                f"({self.drop_reason}); it is started again for the next request",
                remedy="retry",
                kind=ErrorKind.UNAVAILABLE,
            )
        text = self._error_texts[memory_index].tobytes().partition(b"\0")[0]
        return GrammarError.from_info(msgspec.json.decode(text, type=ErrorInfo))


class _WorkerAnswer:
    """An answer in the mask worker.

    The worker matches the tokens of all answers in one call, and makes their masks in another. A
    thread serves the answer alone in three cases:

    - `is_heavy`: the answer's last token or mask took a thread milliseconds.
    - `is_suspect`: a call that included the answer took too long. A thread serves the answer once,
      to measure it.
    - The last mask was slow (`is_slow`). Or it allowed many tokens (`allows_many_tokens`), and the grammar has
      lately had slow masks after such masks (`Matcher.mask_timing`). Then a thread makes only the mask. In
      strings of bounded length, single slow masks follow quick ones.
    """

    __slots__ = (
        "allows_many_tokens",
        "excess_s",
        "has_mask",
        "is_busy",
        "is_heavy",
        "is_over",
        "is_slow",
        "is_suspect",
        "matcher",
        "memory_index",
    )

    def __init__(self, memory_index: int):
        self.memory_index = memory_index
        self.matcher: Any = None  # a Matcher, as soon as the grammar is compiled
        self.has_mask = False  # its first mask was made
        self.is_heavy = self.is_suspect = self.is_slow = self.allows_many_tokens = False
        self.excess_s = 0.0  # seconds that its masks have taken beyond `MAX_MEAN_MASK_S` each
        self.is_busy = True  # a thread will write to its place
        self.is_over = False

    @property
    def needs_thread(self) -> bool:
        """Whether a thread matches its next token and makes the mask behind it."""
        return self.is_heavy or self.is_suspect

    @property
    def needs_mask_thread(self) -> bool:
        """Whether a thread makes its next mask."""
        is_timed = self.allows_many_tokens and self.matcher.mask_timing.num_timed_masks > 0
        return self.matcher.needs_lexer or self.is_slow or is_timed

    def note_mask(self, *, allows_many_tokens: bool) -> None:
        """A mask was made, and it allows many tokens or not."""
        self.allows_many_tokens, self.has_mask = allows_many_tokens, True

    def note_mask_time(self, mask_seconds: float) -> bool:
        """Note the CPU time of a mask; return whether the answer's masks are too slow on average.

        One slow mask is allowed, since it may make lexer states that later masks reuse.
        """
        self.excess_s = max(0.0, self.excess_s + mask_seconds - bounds.MAX_MEAN_MASK_S)
        return self.excess_s > bounds.MAX_MASK_EXCESS_S

    def note_times(self, token_seconds: float | None, mask_seconds: float) -> None:
        """A thread has matched a token, if it is not None, and made a mask, in so much time."""
        self.is_slow = mask_seconds > _SLOW_MASK_S
        self.is_heavy = mask_seconds > _HEAVY_MASK_S
        if token_seconds is not None:
            self.is_suspect = False
            self.is_heavy |= token_seconds > _HEAVY_TOKEN_S
        mask_timing = (
            self.matcher.mask_timing
        )  # of all its answers: a count lost between threads does not matter
        if self.is_slow:
            mask_timing.num_timed_masks = min(
                mask_timing.num_timed_masks + _NUM_TIMED_MASKS, _MAX_TIMED_MASKS
            )
        else:
            mask_timing.num_timed_masks = max(0, mask_timing.num_timed_masks - 1)


_AnswerJob = tuple[_WorkerAnswer, int | None]
"""What a thread does: match an answer's token, if there is one, and make the mask behind it."""


class MaskMaker:
    """Matches answers and makes their masks. Its methods are called by one thread.

    Args:
        memory: Where the masks go.
        tell: Called, by any thread, when something in it has changed.
        num_cpus: Processors that there are; one less is used, if there are so many.

    Attributes:
        answers: By their places.
    """

    def __init__(self, memory: MaskMemory, notify: Callable[[], None], num_cpus: int):
        from llguidance import LLExecutor

        self._memory, self._notify = memory, notify
        self.answers: dict[int, _WorkerAnswer] = {}
        self._stride = max(1, memory.masks.shape[1] // _MIN_SAMPLED_WORDS)
        self._lock = threading.Lock()  # for what threads and `remove_answers` both look at
        self._num_threads = max(1, min(_MAX_BATCH_THREADS, num_cpus - 1))
        self._executor = LLExecutor(self._num_threads)
        self._single_queue: SimpleQueue[_AnswerJob] = SimpleQueue()
        self._heavy_queue: SimpleQueue[_AnswerJob] = SimpleQueue()
        num_alone, num_heavy = max(2, min(_MAX_ANSWER_THREADS, num_cpus - 1)), max(1, num_cpus // 4)
        self._heavy_executor = LLExecutor(num_heavy)
        self._rebuild_queue: SimpleQueue[_AnswerJob] = (
            SimpleQueue()
        )  # these threads wait for compilations
        for queue, count in ((self._single_queue, num_alone), (self._heavy_queue, num_heavy)):
            for _ in range(count):
                threading.Thread(target=self._run_thread, args=(queue,), daemon=True).start()
        for _ in range(2):
            threading.Thread(
                target=self._run_thread, args=(self._rebuild_queue,), daemon=True
            ).start()

    def add_answers(self, memory_indices: Sequence[int], compiled: Future[list[Matcher]]) -> None:
        """Have answers at some places, whose matchers are being compiled."""
        answers = [_WorkerAnswer(memory_index) for memory_index in memory_indices]
        self.answers |= {it.memory_index: it for it in answers}
        compiled.add_done_callback(partial(self._set_matchers, answers))

    def match_tokens(self, memory_indices: np.ndarray, tokens: np.ndarray) -> None:
        """Match a token each of some answers, below 0 for none, and make the masks behind them.

        Args:
            places, tokens: int32 [n].
        """
        start, states = time.perf_counter_ns(), self._memory.states
        answers = self.answers  # without those that a process before this one lost
        pairs = zip(memory_indices.tolist(), tokens.tolist(), strict=True)
        items = [(answers[it], token) for it, token in pairs if it in answers]
        quick = [it for it in items if it[1] >= 0 and not it[0].needs_thread]
        for answer, token in items if len(quick) < len(items) else ():
            if token < 0:
                states[answer.memory_index] = AnswerState.READY  # the mask that was there
            elif answer.needs_thread:
                self._queue_answer(answer, token)
        together = [item for item in quick if item[0].matcher.can_consume_directly(item[1])]
        errors: dict[int, BaseException] = {}
        for answer, token in quick if len(together) < len(quick) else ():
            if not answer.matcher.can_consume_directly(token):
                try:
                    answer.matcher.accept(token)
                except BaseException as error:  # a panic in Rust is no Exception
                    errors[answer.memory_index] = error
        if together:
            errors |= self._consume_batch(together)
        left = [answer for answer, _ in quick if answer.memory_index not in errors]
        for memory_index, error in errors.items():
            self._fail(self.answers[memory_index], error)
        found = [
            AnswerState.STOPPED if it.matcher.is_stopped else AnswerState.PENDING for it in left
        ]
        states[[it.memory_index for it in left]] = found
        taken = time.perf_counter_ns()
        self._memory.counts[:2] += 1, taken - start
        self._notify()
        self._make_masks([it for it in left if not it.matcher.is_stopped])
        self._memory.counts[2] += time.perf_counter_ns() - taken

    def remove_answers(self, memory_indices: np.ndarray) -> None:
        """Some answers are over; their places are FREE as soon as no thread writes to them."""
        for memory_index in memory_indices.tolist():
            answer = self.answers.pop(memory_index, None)
            with self._lock:
                if answer is None or not answer.is_busy:
                    self._memory.states[memory_index] = AnswerState.FREE
                else:
                    answer.is_over = True

    def _consume_batch(
        self, items: Sequence[tuple[_WorkerAnswer, int]]
    ) -> dict[int, BaseException]:
        """Let llguidance match tokens; return what went wrong, by places."""
        errors: dict[int, BaseException] = {}
        for chunk in _chunks(items):
            start = time.perf_counter()
            try:
                inner = [(answer.matcher.inner, token) for answer, token in chunk]
                allowed = self._executor.consume_token_par(inner)
                for (answer, token), is_allowed in zip(chunk, allowed, strict=True):
                    if (error := answer.matcher.note_consumed(token, is_allowed)) is not None:
                        errors[answer.memory_index] = error
            except BaseException as error:
                errors |= {answer.memory_index: error for answer, _ in chunk}
            if self._is_late(start, len(chunk)):
                for answer, _ in chunk:
                    answer.is_suspect = True
        return errors

    def _is_late(self, start: float, count: int) -> bool:
        """Return whether `count` tokens or masks took much longer than usual since `start`."""
        usual = _USUAL_ITEM_S * -(-count // self._num_threads)
        return time.perf_counter() - start > usual + _LATE_CHUNK_S

    def _make_masks(self, answers: Sequence[_WorkerAnswer]) -> None:
        """Make masks: those that are likely to be quick together, the others in threads."""
        quick = [it for it in answers if not it.needs_mask_thread]
        for answer in answers if len(quick) < len(answers) else ():
            if answer.needs_mask_thread:
                self._queue_answer(answer, None)
        if not quick:
            return
        try:
            errors = self._fill_batch(quick)
        except BaseException as error:
            errors = {answer.memory_index: error for answer in quick}
        for answer in quick:
            if answer.memory_index in errors:
                self._fail(answer, errors[answer.memory_index])
        left = [it for it in quick if it.memory_index not in errors]
        made = [it.memory_index for it in left if not it.matcher.needs_lexer]
        self._memory.states[made] = AnswerState.READY
        self._notify()
        if len(made) < len(left):
            self._make_masks([it for it in left if it.matcher.needs_lexer])

    def _fill_batch(self, answers: Sequence[_WorkerAnswer]) -> dict[int, BaseException]:
        """Write the masks of some answers; return what went wrong, by places."""
        from llguidance.numpy import fill_next_token_bitmask_par

        masks, memory_indices = self._memory.masks, np.array([it.memory_index for it in answers])
        late: list[Sequence[_WorkerAnswer]] = []
        for chunk in _chunks([it for it in answers if not it.matcher.is_in_reasoning]):
            start = time.perf_counter()
            inner = [(it.matcher.inner, it.memory_index) for it in chunk]
            fill_next_token_bitmask_par(self._executor, inner, masks)
            if self._is_late(start, len(chunk)):
                late.append(chunk)
        errors: dict[int, BaseException] = {}
        have_eos = answers[0].matcher.vocabulary.have_eos(masks, memory_indices).tolist()
        for answer, has_eos in zip(answers, have_eos, strict=True):
            matcher: Matcher = answer.matcher
            if has_eos or not matcher.is_constrained or matcher.inner.is_error():  # few
                error = matcher.adapt_mask(masks[answer.memory_index])
                if error is not None:
                    errors[answer.memory_index] = error
        some = masks[:, :: self._stride][memory_indices]
        are_wide = 2 * np.count_nonzero(some, axis=1) > some.shape[1]
        for answer, allows_many_tokens in zip(answers, are_wide.tolist(), strict=True):
            answer.note_mask(allows_many_tokens=allows_many_tokens)
        for chunk in late:
            wide = [it for it in chunk if it.allows_many_tokens]
            for answer in wide:
                answer.matcher.mask_timing.num_timed_masks = max(
                    answer.matcher.mask_timing.num_timed_masks, 1
                )
            for answer in () if wide else chunk:
                answer.is_slow = True
        return errors

    def _set_matchers(
        self, answers: Sequence[_WorkerAnswer], compiled: Future[list[Matcher]]
    ) -> None:
        """The grammar of some answers is compiled, or cannot be: their first masks follow."""
        if (error := compiled.exception()) is not None:
            for answer in answers:
                self._finish_job(answer, error)
            return
        for answer, matcher in zip(answers, compiled.result(), strict=True):
            answer.matcher = matcher
            self._single_queue.put((answer, None))

    def _queue_answer(self, answer: _WorkerAnswer, token: int | None) -> None:
        """Let a thread serve an answer."""
        answer.is_busy = True
        self._memory.states[answer.memory_index] = (
            AnswerState.HEAVY if answer.is_heavy else AnswerState.PENDING
        )
        (self._heavy_queue if answer.is_heavy else self._single_queue).put((answer, token))

    def _run_thread(self, queue: SimpleQueue[_AnswerJob]) -> None:
        """Serve answers one by one, for ever."""
        while True:
            answer, token = queue.get()
            try:
                if queue is self._rebuild_queue:
                    answer.matcher.rebuild_lexer()
                error = self._serve(answer, token)
            except BaseException as found:
                error = found
            if error is None and answer.matcher.needs_lexer and not answer.is_over:
                self._rebuild_queue.put((answer, None))
            else:
                self._finish_job(answer, error)
            answer = error = None  # no thread that waits keeps an answer's lexer

    def _serve(self, answer: _WorkerAnswer, token: int | None) -> BaseException | None:
        """Match an answer's token, if there is one, and make its mask; return what went wrong. An
        answer fails whose mask takes a processor too long, unless it is the answer's first."""
        matcher, token_seconds = answer.matcher, None
        if token is not None:
            token_seconds = self._match(answer, token)
            if matcher.is_stopped:
                return None
        if matcher.needs_lexer:
            return None  # `_run_thread` lets another thread replace it
        masks, start = self._memory.masks, time.thread_time()
        error = matcher.try_fill_mask(masks, answer.memory_index)
        if matcher.needs_lexer:
            return None
        mask_seconds = time.thread_time() - start
        if not answer.has_mask:
            mask_seconds = 0.0  # states are made that the next masks find
        elif answer.note_mask_time(mask_seconds):
            error = matcher.too_slow_error()
        some = masks[answer.memory_index, :: self._stride]
        answer.note_mask(allows_many_tokens=bool(2 * np.count_nonzero(some) > len(some)))
        answer.note_times(token_seconds, mask_seconds)
        return error

    def _match(self, answer: _WorkerAnswer, token: int) -> float:
        """Match a token; return the time that it took."""
        matcher = answer.matcher
        if not (answer.is_heavy and matcher.can_consume_directly(token)):
            start = time.thread_time()
            matcher.accept(token)
            return time.thread_time() - start
        # llguidance releases Python's lock only for the tokens of two or more matchers, so a broken
        # matcher joins. This is wall time: the CPU time of llguidance's threads is not known.
        start = time.perf_counter()
        inner = [(matcher.inner, token), (broken_matcher(matcher.vocabulary), token)]
        is_allowed, _ = self._heavy_executor.consume_token_par(inner)
        seconds = time.perf_counter() - start
        if (error := matcher.note_consumed(token, is_allowed)) is not None:
            raise error
        return seconds

    def _finish_job(self, answer: _WorkerAnswer, error: BaseException | None) -> None:
        """A thread has done with an answer."""
        with self._lock:
            answer.is_busy = False
            if answer.is_over:
                self._memory.states[answer.memory_index] = AnswerState.FREE
            elif error is None:
                is_stopped = answer.matcher.is_stopped
                self._memory.states[answer.memory_index] = (
                    AnswerState.STOPPED if is_stopped else AnswerState.READY
                )
            else:
                self._fail(answer, error)
        self._notify()

    def _fail(self, answer: _WorkerAnswer, error: BaseException) -> None:
        if not isinstance(error, GrammarError) and answer.matcher is not None:
            error = answer.matcher.unexpected_error(error)
        self._memory.write_error(answer.memory_index, error)


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut a list into parts of `_MAX_CHUNK_ANSWERS` items, of about the same size."""
    count = -(-len(items) // _MAX_CHUNK_ANSWERS)
    for i in range(count):
        yield items[i * len(items) // count : (i + 1) * len(items) // count]


def encode_message(kind: MaskMessageKind, *parts: bytes, count: int = 0) -> bytes:
    """Return a message to the process, of `count` answers, as it travels."""
    return frame_message(_HEADER.pack(kind, count), *parts)


def main(sock: socket.socket, fd: str) -> None:
    """Do what the engine says over the channel, until it closes. Never returns.

    The first message is the `MaskWorkerSettings`, in JSON. Back comes a byte whenever something in the memory
    has changed.

    Args:
        sock: The channel.
        file: The descriptor of the `MaskMemory`.
    """
    faulthandler.enable()  # a crash in a library prints the threads' stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine's, which may drain first
    exit_with_parent(sock)  # also while a library is at work
    sys.setswitchinterval(0.0005)  # masks wait no longer for the Python of threads that compile
    with suppress(OSError):  # where memory is short, rather this process than the engine's
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")

    def notify() -> None:
        with suppress(OSError):  # the engine has gone, or has enough bytes to read
            sock.send(b"!", socket.MSG_DONTWAIT)

    try:
        _handle_messages(sock, int(fd), notify)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # threads may be at work


def _handle_messages(sock: socket.socket, fd: int, notify: Callable[[], None]) -> None:
    """Do what messages say, to their end."""
    if (message := receive(sock)) is None:
        return
    settings = msgspec.json.decode(memoryview(message)[_HEADER.size :], type=MaskWorkerSettings)
    memory = MaskMemory(settings.capacity, settings.mask_width, fd)
    submit = _load_compiler(settings)
    job_decoder = msgspec.json.Decoder(MaskJob)
    maker = MaskMaker(memory, notify, len(os.sched_getaffinity(0)))
    gc.collect()
    gc.freeze()  # the vocabulary is not walked through again
    while (message := receive(sock)) is not None:
        kind, count = _HEADER.unpack_from(message)
        if kind == MaskMessageKind.TOKENS:
            found = np.frombuffer(message, np.int32, offset=_HEADER.size)
            maker.match_tokens(found[:count], found[2 * count :][found[count : 2 * count]])
        elif kind == MaskMessageKind.END:
            maker.remove_answers(np.frombuffer(message, np.int32, offset=_HEADER.size))
        else:
            it = job_decoder.decode(memoryview(message)[_HEADER.size :])
            maker.add_answers(
                it.memory_indices, submit(it.spec, it.ending_ids, len(it.memory_indices))
            )


def _load_compiler(settings: MaskWorkerSettings) -> Callable[..., Future[list[Matcher]]]:
    """`GrammarCompiler.submit`, with the tokenizer loaded once more."""
    try:
        tokenizer = Tokenizer.from_folder(Path(settings.folder))
    except Exception as error:
        failed: Future[list[Matcher]] = Future()
        where = f"from {settings.folder!r} again"
        problem = f": no tokenizer could be loaded {where}: {error}"
        failed.set_exception(GrammarError("structured_outputs", problem, kind=ErrorKind.INTERNAL))
        return lambda *_: failed
    return GrammarCompiler(tokenizer, settings.vocab_size, settings.eos_token_ids).submit
