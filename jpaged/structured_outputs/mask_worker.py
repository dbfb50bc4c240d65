"""The mask worker: a process that compiles grammars, matches tokens and makes masks.

The process runs `main` and shares memory with the engine, which uses
`mask_client.MaskWorkerClient`. An answer is the output of one sequence that must match a grammar. A
mask says which tokens the grammar of an answer allows next.

llguidance takes 15 to 30 us for most masks. Two cases are slow:

- A string with a maximum length may have room for fewer characters than some tokens have. The mask
  then needs a walk through the whole vocabulary, which takes 1 to 2 ms.
- If a grammar is ambiguous, matching a token may take several milliseconds.

Therefore, the worker makes the masks of all answers in one call as long as no mask is slow. Threads
make the masks that may be slow, one mask at a time (`_WorkerAnswer`).
"""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np

from jpaged.errors import ErrorKind
from jpaged.processes import exit_with_parent, receive
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.mask_memory import (
    MESSAGE_HEADER,
    AnswerState,
    MaskJob,
    MaskMemory,
    MaskMessageKind,
    MaskWorkerSettings,
)
from jpaged.structured_outputs.matcher import GrammarError, Matcher, broken_matcher
from jpaged.text.tokenizer import Tokenizer

_MAX_ANSWER_THREADS = 16
"""Maximum number of threads that make token masks one at a time, not in batches."""

_MAX_CHUNK_ANSWERS = 16
"""Maximum number of answers in a chunk.

One call of llguidance matches the tokens or makes the masks of a chunk. Each call is timed."""

_USUAL_ITEM_S = 5e-5
"""Usual seconds to match a token or to make a mask in one thread of llguidance, rounded up."""

_LATE_CHUNK_S = 5e-4
"""Seconds beyond the usual time after which a call of llguidance for a chunk of answers is late.

The cause of a late call is a slow answer in the chunk."""

_SLOW_MASK_S = 3e-4
"""CPU seconds for one token mask above which the mask counts as slow."""

_NUM_TIMED_MASKS = 64
"""After a slow mask, threads make this number of masks of the same grammar one by one, and measure
the time of each mask. Later masks are made in batches again.

Only masks that follow a mask with many allowed tokens are counted.
"""

_MAX_TIMED_MASKS = 1024
"""Maximum number of masks of a grammar that are still to be timed (`MaskTiming.num_timed_masks`).

Each slow mask adds `_NUM_TIMED_MASKS` to this number."""

_HEAVY_TOKEN_S = 1e-3
"""CPU seconds for matching one token above which an answer counts as heavy, because its grammar is
then ambiguous.

Ambiguous grammars need 4 to 8 ms, all other grammars at most 0.2 ms."""

_HEAVY_MASK_S = 1e-2
"""CPU seconds for one mask above which an answer counts as heavy. Strings with a maximum length
need up to 3 ms."""

_MAX_BATCH_THREADS = 8
"""Maximum number of llguidance's threads for masks that are made in batches."""

_MIN_SAMPLED_WORDS = 64
"""Minimum number of mask words that are sampled to see whether the mask allows many tokens."""


class _WorkerAnswer:
    """The mask worker's record of an answer.

    The worker matches the tokens of all answers in one batch, and makes the masks of all answers in
    a second batch. In three cases, a separate thread processes the answer:

    - `is_heavy`: for the answer's last token, matching or making the mask took milliseconds.
    - `is_suspect`: a batch that contained the answer took too long. A thread processes the answer
      once, to measure whether this answer was the cause.
    - `needs_mask_thread`: the answer's last mask was slow, or the next mask must be timed, or the
      answer's lexer must be replaced. A mask is timed if the answer's last mask allowed many tokens
      and the grammar recently had slow masks (`Matcher.mask_timing`). In this case, the thread
      makes only the mask, and a batch matches the token.

    Timing is needed because a fast mask may precede a slow mask in strings of bounded length.
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
        self.matcher: Any = None  # a `Matcher`; None until the grammar is compiled
        self.has_mask = False  # whether the answer's first mask was made
        self.is_heavy = self.is_suspect = self.is_slow = self.allows_many_tokens = False
        # Sum over the answer's masks of (CPU seconds of the mask - `bounds.MAX_MEAN_MASK_S`). The
        # sum is set to 0 whenever it becomes negative.
        self.excess_s = 0.0
        self.is_busy = True  # whether a thread may still write to the answer's `MaskMemory` entry
        self.is_over = False

    @property
    def needs_thread(self) -> bool:
        """Whether a separate thread must match the answer's next token and make the next mask.

        Otherwise, the worker matches the token in one batch with tokens of other answers.
        """
        return self.is_heavy or self.is_suspect

    @property
    def needs_mask_thread(self) -> bool:
        """Whether a separate thread must make the answer's next mask.

        Otherwise, the worker makes the mask in one batch with masks of other answers.
        """
        is_timed = self.allows_many_tokens and self.matcher.mask_timing.num_timed_masks > 0
        return self.matcher.needs_lexer or self.is_slow or is_timed

    def note_mask(self, *, allows_many_tokens: bool) -> None:
        """Record that a mask was made. `allows_many_tokens` says whether the mask allows many
        tokens."""
        self.allows_many_tokens, self.has_mask = allows_many_tokens, True

    def note_mask_time(self, mask_seconds: float) -> bool:
        """Record the CPU time of a mask. Return whether the answer's masks are too slow on average.

        A single slow mask is allowed, because making the mask may create lexer states that later
        masks reuse.
        """
        self.excess_s = max(0.0, self.excess_s + mask_seconds - bounds.MAX_MEAN_MASK_S)
        return self.excess_s > bounds.MAX_MASK_EXCESS_S

    def note_times(self, token_seconds: float | None, mask_seconds: float) -> None:
        """Record the times that a thread needed to match a token and to make a mask.

        Args:
            token_seconds: Seconds for the token; None if the thread matched no token.
            mask_seconds: Seconds for the mask.
        """
        self.is_slow = mask_seconds > _SLOW_MASK_S
        self.is_heavy = mask_seconds > _HEAVY_MASK_S
        if token_seconds is not None:
            self.is_suspect = False
            self.is_heavy |= token_seconds > _HEAVY_TOKEN_S
        # The threads update `mask_timing` without a lock. A lost update is harmless: one mask more
        # or less is timed.
        mask_timing = self.matcher.mask_timing
        if self.is_slow:
            mask_timing.num_timed_masks = min(
                mask_timing.num_timed_masks + _NUM_TIMED_MASKS, _MAX_TIMED_MASKS
            )
        else:
            mask_timing.num_timed_masks = max(0, mask_timing.num_timed_masks - 1)


_AnswerJob = tuple[_WorkerAnswer, int | None]
"""Job of a thread, as a pair (answer, token): match the token, and make the answer's next mask. If
the token is None, only make the mask."""


class MaskMaker:
    """Grammar matchers of structured answers, and threads that make masks of allowed next tokens.

    Call all methods from one thread.

    Args:
        memory: Shared memory for the masks and the state of each answer.
        notify: Function that this object calls after changes in the shared memory, in any thread.
        num_cpus: Number of CPUs. This number bounds the number of threads.

    Attributes:
        answers: Answers by `MaskMemory` index.
    """

    def __init__(self, memory: MaskMemory, notify: Callable[[], None], num_cpus: int):
        from llguidance import LLExecutor

        self._memory, self._notify = memory, notify
        self.answers: dict[int, _WorkerAnswer] = {}
        self._stride = max(1, memory.masks.shape[1] // _MIN_SAMPLED_WORDS)
        # A thread holds the lock while it checks `is_busy` or `is_over` of an answer and acts on
        # the result.
        self._lock = threading.Lock()
        self._num_threads = max(1, min(_MAX_BATCH_THREADS, num_cpus - 1))
        self._executor = LLExecutor(self._num_threads)
        self._single_queue: SimpleQueue[_AnswerJob] = SimpleQueue()
        self._heavy_queue: SimpleQueue[_AnswerJob] = SimpleQueue()
        num_alone, num_heavy = max(2, min(_MAX_ANSWER_THREADS, num_cpus - 1)), max(1, num_cpus // 4)
        self._heavy_executor = LLExecutor(num_heavy)
        # `_rebuild_queue` contains answers that need a new lexer. `GrammarCompiler` builds lexers
        # in separate threads, which takes long. Only the two threads of `_rebuild_queue` wait for
        # lexers. Meanwhile, the threads of the other two queues make masks of other answers.
        self._rebuild_queue: SimpleQueue[_AnswerJob] = SimpleQueue()
        for queue, count in ((self._single_queue, num_alone), (self._heavy_queue, num_heavy)):
            for _ in range(count):
                threading.Thread(target=self._run_thread, args=(queue,), daemon=True).start()
        for _ in range(2):
            threading.Thread(
                target=self._run_thread, args=(self._rebuild_queue,), daemon=True
            ).start()

    def add_answers(self, memory_indices: Sequence[int], compiled: Future[list[Matcher]]) -> None:
        """Add answers with one grammar, and make their first masks when the grammar is compiled.

        Args:
            memory_indices: Index of each answer's entry in the `MaskMemory`.
            compiled: Future whose result is a list with one matcher per answer.
        """
        answers = [_WorkerAnswer(memory_index) for memory_index in memory_indices]
        self.answers |= {it.memory_index: it for it in answers}
        compiled.add_done_callback(partial(self._set_matchers, answers))

    def match_tokens(self, memory_indices: np.ndarray, tokens: np.ndarray) -> None:
        """Match one token per answer, and make the masks of the next tokens.

        Args:
            memory_indices: Index of each answer's entry in the `MaskMemory`, int32 [n].
            tokens: One token per answer, int32 [n]. A negative token means that no token was
                sampled.
        """
        start, states = time.perf_counter_ns(), self._memory.states
        # Skip answers of an earlier mask worker, which this mask worker does not know.
        answers = self.answers
        pairs = zip(memory_indices.tolist(), tokens.tolist(), strict=True)
        items = [(answers[it], token) for it, token in pairs if it in answers]
        quick = [it for it in items if it[1] >= 0 and not it[0].needs_thread]
        for answer, token in items if len(quick) < len(items) else ():
            if token < 0:
                # If no token was sampled for an answer, the answer's old mask is still valid.
                states[answer.memory_index] = AnswerState.READY
            elif answer.needs_thread:
                self._queue_answer(answer, token)
        together = [item for item in quick if item[0].matcher.can_consume_directly(item[1])]
        errors: dict[int, BaseException] = {}
        for answer, token in quick if len(together) < len(quick) else ():
            if not answer.matcher.can_consume_directly(token):
                try:
                    answer.matcher.accept(token)
                except BaseException as error:  # a panic in Rust is a BaseException
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
        """Remove answers that are over, and set the states of their `MaskMemory` entries to FREE.

        If a thread may still write to an entry, the entry becomes FREE when the thread is done.
        """
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
        """Let matchers consume tokens, in batches. An item is an answer and its new token.

        Returns:
            The errors of answers that failed, by `MaskMemory` index.
        """
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
        """Return whether a chunk of `count` tokens or masks took much longer than usual.

        Args:
            start: Value of `time.perf_counter` when the work on the chunk started.
            count: Number of tokens or masks in the chunk.
        """
        usual = _USUAL_ITEM_S * -(-count // self._num_threads)
        return time.perf_counter() - start > usual + _LATE_CHUNK_S

    def _make_masks(self, answers: Sequence[_WorkerAnswer]) -> None:
        """Make the masks of answers in one batch. Separate threads make masks that may be slow."""
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
        """Make the masks of answers in batches.

        Returns:
            The errors of answers that failed, by `MaskMemory` index.
        """
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
            if has_eos or not matcher.is_constrained or matcher.inner.is_error():
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
        """Give answers their compiled matchers, and queue jobs that make the first masks.

        If the grammar cannot be compiled, fail the answers.
        """
        if (error := compiled.exception()) is not None:
            for answer in answers:
                self._finish_job(answer, error)
            return
        for answer, matcher in zip(answers, compiled.result(), strict=True):
            answer.matcher = matcher
            self._single_queue.put((answer, None))

    def _queue_answer(self, answer: _WorkerAnswer, token: int | None) -> None:
        """Queue a job for a thread: make the next grammar mask of a model's answer.

        If `token` is not None, the thread first matches the token against the answer's grammar.
        """
        answer.is_busy = True
        self._memory.states[answer.memory_index] = (
            AnswerState.HEAVY if answer.is_heavy else AnswerState.PENDING
        )
        (self._heavy_queue if answer.is_heavy else self._single_queue).put((answer, token))

    def _run_thread(self, queue: SimpleQueue[_AnswerJob]) -> None:
        """Run the jobs of `queue` one by one, and never return.

        Each job makes the next mask of an answer.
        """
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
            # Drop the references, so that the answer's lexer can be freed while this thread waits
            # for the next job.
            answer = error = None

    def _serve(self, answer: _WorkerAnswer, token: int | None) -> BaseException | None:
        """Match an answer's token, and make the next mask. If `token` is None, only make the mask.

        Returns:
            The answer's error, or None. An answer fails if its masks take too much CPU time on
            average. The first mask does not count.
        """
        matcher, token_seconds = answer.matcher, None
        if token is not None:
            token_seconds = self._match(answer, token)
            if matcher.is_stopped:
                return None
        if matcher.needs_lexer:
            return None  # the caller queues the answer for a thread that replaces the lexer
        masks, start = self._memory.masks, time.thread_time()
        error = matcher.try_fill_mask(masks, answer.memory_index)
        if matcher.needs_lexer:
            return None
        mask_seconds = time.thread_time() - start
        if not answer.has_mask:
            # Do not count the first mask, which creates lexer states that later masks reuse.
            mask_seconds = 0.0
        elif answer.note_mask_time(mask_seconds):
            error = matcher.too_slow_error()
        some = masks[answer.memory_index, :: self._stride]
        answer.note_mask(allows_many_tokens=bool(2 * np.count_nonzero(some) > len(some)))
        answer.note_times(token_seconds, mask_seconds)
        return error

    def _match(self, answer: _WorkerAnswer, token: int) -> float:
        """Match a token of an answer, and return the seconds that matching took."""
        matcher = answer.matcher
        if not (answer.is_heavy and matcher.can_consume_directly(token)):
            start = time.thread_time()
            matcher.accept(token)
            return time.thread_time() - start
        # llguidance releases the GIL only if a call gets two or more matchers. Therefore, pass a
        # broken matcher as the second matcher. Measure wall time, because the CPU time of
        # llguidance's threads is unknown.
        start = time.perf_counter()
        inner = [(matcher.inner, token), (broken_matcher(matcher.vocabulary), token)]
        is_allowed, _ = self._heavy_executor.consume_token_par(inner)
        seconds = time.perf_counter() - start
        if (error := matcher.note_consumed(token, is_allowed)) is not None:
            raise error
        return seconds

    def _finish_job(self, answer: _WorkerAnswer, error: BaseException | None) -> None:
        """Set an answer's state when a thread's work for the answer is done or has failed."""
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
    """Split a list into chunks of similar sizes. A chunk has at most `_MAX_CHUNK_ANSWERS` items."""
    count = -(-len(items) // _MAX_CHUNK_ANSWERS)
    for i in range(count):
        yield items[i * len(items) // count : (i + 1) * len(items) // count]


def main(sock: socket.socket, fd: str) -> None:
    """Run the mask worker until the engine closes the socket, then exit the process.

    The first message has the `MaskWorkerSettings` in JSON. The worker sends one byte to the engine
    after each change in the shared memory.

    Args:
        sock: Socket to the engine.
        fd: File descriptor of the `MaskMemory`.
    """
    faulthandler.enable()  # print the stacks of all threads if a library crashes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Watch the parent in another thread: libraries may block this thread.
    exit_with_parent(sock)
    # Make compiling threads release the GIL sooner. Other threads need the GIL to make masks.
    sys.setswitchinterval(0.0005)
    with suppress(OSError):  # if memory runs out, Linux kills this process, not the engine
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")

    def notify() -> None:
        with suppress(OSError):  # the engine has ended, or has not read earlier bytes yet
            sock.send(b"!", socket.MSG_DONTWAIT)

    try:
        _handle_messages(sock, int(fd), notify)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # exit without waiting for other threads


def _handle_messages(sock: socket.socket, fd: int, notify: Callable[[], None]) -> None:
    """Handle the engine's messages until the engine closes the socket."""
    if (message := receive(sock)) is None:
        return
    settings = msgspec.json.decode(
        memoryview(message)[MESSAGE_HEADER.size :], type=MaskWorkerSettings
    )
    memory = MaskMemory(settings.capacity, settings.mask_width, fd)
    submit = _load_compiler(settings)
    job_decoder = msgspec.json.Decoder(MaskJob)
    maker = MaskMaker(memory, notify, len(os.sched_getaffinity(0)))
    gc.collect()
    gc.freeze()  # later garbage collections skip the tokenizer's vocabulary
    while (message := receive(sock)) is not None:
        kind, count = MESSAGE_HEADER.unpack_from(message)
        if kind == MaskMessageKind.TOKENS:
            found = np.frombuffer(message, np.int32, offset=MESSAGE_HEADER.size)
            maker.match_tokens(found[:count], found[2 * count :][found[count : 2 * count]])
        elif kind == MaskMessageKind.END:
            maker.remove_answers(np.frombuffer(message, np.int32, offset=MESSAGE_HEADER.size))
        else:
            it = job_decoder.decode(memoryview(message)[MESSAGE_HEADER.size :])
            maker.add_answers(
                it.memory_indices, submit(it.spec, it.ending_ids, len(it.memory_indices))
            )


def _load_compiler(settings: MaskWorkerSettings) -> Callable[..., Future[list[Matcher]]]:
    """Load the tokenizer and return `GrammarCompiler.submit`.

    If loading fails, the returned function returns a failed future.
    """
    try:
        tokenizer = Tokenizer.from_folder(Path(settings.folder))
    except Exception as error:
        failed: Future[list[Matcher]] = Future()
        where = f"from {settings.folder!r}"
        problem = f": the mask worker could not load the tokenizer {where}: {error}"
        failed.set_exception(GrammarError("structured_outputs", problem, kind=ErrorKind.INTERNAL))
        return lambda *_: failed
    return GrammarCompiler(tokenizer, settings.vocab_size, settings.eos_token_ids).submit
