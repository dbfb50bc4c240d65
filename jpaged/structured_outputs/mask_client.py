"""The process that compiles grammars and makes masks: what of it runs in the engine.

What runs Python in the engine's process takes Python's lock from the thread that launches steps:
with 64 rows that cost more than the masks. So matchers and masks have a process of their own
(`mask_worker.py`), started with the first grammar that is asked for. Tokens go there over a socket,
by a thread that waits for the device; the state of answers and their masks are in memory that both
share. Where that process ends, whatever ends it, requests with grammars fail, and the next one
starts it again. Where it does not answer, as a stopped process does not, a step waits for it no
longer than `max_wait_s`; the engine goes on without these rows.
"""

import heapq
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np

from jpaged.processes import Child, can_start_python, describe_exit
from jpaged.structured_outputs import StructuredOutputs
from jpaged.structured_outputs.mask_worker import (
    AnswerState,
    MaskJob,
    MaskMemory,
    MaskMessageKind,
    MaskWorkerSettings,
    encode_message,
)
from jpaged.structured_outputs.matcher import GrammarError

AnswerRows = Sequence[tuple["Answer", int]]
"""Answers, and the row of each."""

EndedAnswers = list[tuple[int, GrammarError | None]]
"""Indices in `AnswerRows` of the answers that are over; why they fail, or None if they are complete."""

ShouldStopWaiting = Callable[[Sequence[int], Collection[int]], bool]
"""Whether a step waits no longer: called with the indices in `AnswerRows` of the answers whose masks are
not made, and of those among them that are heavy (`AnswerState.HEAVY`)."""


def never_stop_waiting(late: Sequence[int], heavy: Collection[int]) -> bool:
    """Wait until all masks are made, as a `ShouldStopWaiting`."""
    return False


_NO_ANSWERS: tuple[Sequence["Answer"], np.ndarray] = (), np.zeros((2, 0), np.int32)
"""Answers; their places, and their rows."""

_POLL_INTERVAL_S = 5e-5
"""Seconds between two checks of whether a step still waits for masks."""

_FAST_POLL_S, _SLOW_POLL_INTERVAL_S = 5e-3, 1e-3
"""After `_FAST_POLL_S` seconds of waiting, the checks are `_SLOW_POLL_INTERVAL_S` seconds apart."""

MAX_OPEN_FILES = 1024
"""Open at once, for `select`: no other call waits for less than a millisecond."""

_MAX_COUNTED_SILENCE_S = 1.0
"""Seconds that count between two looks at a process that says nothing: this one may have been
stopped for longer, as by Ctrl-Z."""

_EXIT_TIMEOUT_S = 0.5
"""Maximum wait for the exit code of a mask worker that has closed its socket."""

_MAX_COUNTED_WAIT_S = 0.01
"""Maximum of the seconds between two looks that count as waiting for the process: where this
process was not running either, the other one may have had no processor."""


class Answer:
    """An answer that obeys a grammar.

    Attributes:
        memory_index: Its own in the memory.
        is_stopped: Nothing may follow.
        error: Why it fails.
    """

    __slots__ = ("__weakref__", "error", "is_stopped", "memory_index")

    def __init__(self, memory_index: int):
        self.memory_index = memory_index
        self.is_stopped = False
        self.error: GrammarError | None = None

    @property
    def is_over(self) -> bool:
        """Whether its last token, as it was read, ends it."""
        return self.is_stopped or self.error is not None


class Constraint:
    """What a request's answers obey.

    Attributes:
        answers: One a sample.
    """

    def __init__(self, process: "MaskWorkerClient", answers: list[Answer]):
        self.answers, self._process = answers, process

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._process.are_ready(self.answers)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is ready, or so long."""
        self._process.wait_for(self.answers, seconds)

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the tokens that the grammar allows next, as of the last mask of one answer."""
        return self._process.allowed_ids(answer)

    def check(self) -> None:
        """Wait until it is ready; GrammarError if the grammar cannot be compiled."""
        self.wait()
        for answer in self.answers:
            if (error := self._process.answer_error(answer)) is not None:
                raise error


class MaskWorkerClient:
    """The process, and the answers in it. Not thread-safe.

    Args:
        folder: Of the tokenizer.
        vocab_size: Width of the logits; ids above the tokenizer's own are never allowed.
        eos_token_ids: The model's own end tokens.
        places: One more than there are answers at most, those that wait for their turn among them.
            Only what was used of them takes memory.
        longest_wait: Maximum of the seconds that a step with other rows waits for the process.
        longest_silence: Seconds after which the process is killed if it reports nothing while an
            answer waits for it. The start of the process counts too.

    Attributes:
        seconds_waited: Seconds that the present step has waited for the process, from its tokens
            to the masks.
        longest_wait: As given.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        capacity: int = 1 << 16,
        max_wait_s: float = 0.1,
        silence_timeout_s: float = 30.0,
    ):
        width = -(-vocab_size // 32)
        self._settings = MaskWorkerSettings(str(folder), vocab_size, eos_token_ids, capacity, width)
        self.max_wait_s, self.silence_timeout_s = max_wait_s, silence_timeout_s
        self.seconds_waited = 0.0
        self._is_stalled = False  # it told nothing while a step waited for it, nor since
        self._memory: Any = None  # a MaskMemory, since the first grammar
        self._worker: Any = None  # a _Line to the process, where there is one
        self._num_used_indices, self._free_indices = (
            1,
            list[int](),
        )  # that were ever used; a heap of free ones
        self._unreported_ends: deque[int] = (
            deque()
        )  # of answers that are gone, the process not told yet
        self._reported_ends: list[int] = []  # told, and not free yet
        self._last_gathered = _NO_ANSWERS
        self._pending_answers: Sequence[Answer] = ()
        self._pending_indices: Any = None  # int32 [n]: places of those
        self._unsent_message: Callable[[], bytes] | None = None
        self._num_steps_sent = 0  # steps' tokens
        self._silent_s = self._polled_at = 0.0  # seconds without news of what is pending; when seen
        self._buffer = np.zeros((0, 0), np.int32)

    def submit(
        self, spec: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Constraint:
        """Begin to compile a form for so many answers, which tokens `ending_ids` may end.

        Raises:
            RuntimeError: no process can be started, or there are too many answers.
        """
        self._read_notifications()
        worker = self._worker = self._worker or self._start_worker()
        self._report_ends()
        memory_indices = self._allocate_indices(count)
        self._memory.states[memory_indices] = AnswerState.PENDING
        answers = [Answer(memory_index) for memory_index in memory_indices]
        for answer in answers:
            weakref.finalize(
                answer, self._unreported_ends.append, answer.memory_index
            ).atexit = False
        job = MaskJob(spec, memory_indices, ending_ids)
        worker.put(partial(encode_message, MaskMessageKind.BEGIN, msgspec.json.encode(job)))
        return Constraint(self, answers)

    def are_ready(self, answers: Sequence[Answer]) -> bool:
        """Whether the masks of some answers are made, or cannot be."""
        states = self._memory.states
        if any(states[it.memory_index] < AnswerState.READY for it in answers):
            self._read_notifications()
            self._check_silence()
        return all(states[it.memory_index] >= AnswerState.READY for it in answers)

    def wait_for(self, answers: Sequence[Answer], seconds: float | None) -> None:
        """Wait until they are, or so long."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.are_ready(answers) and (until is None or time.monotonic() < until):
            self._await_notification(
                min(_MAX_COUNTED_SILENCE_S, _MAX_COUNTED_SILENCE_S if seconds is None else seconds)
            )

    def answer_error(self, answer: Answer) -> GrammarError | None:
        """Why an answer fails."""
        if self._memory.states[answer.memory_index] < AnswerState.FAILED:
            return None
        return self._memory.read_error(answer.memory_index)

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the tokens that the last mask of an answer allows."""
        mask = self._memory.masks[answer.memory_index].view(np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()

    def request_masks(
        self, skipped: Collection[int], tokens: Callable[[], np.ndarray], *, send_now: bool
    ) -> None:
        """Begin with the masks behind a step's tokens, which the engine has not read.

        Args:
            left: Indices of those in `gather_masks`'s items that get none.
            tokens: Waits for the step's tokens, int32 [rows]; below 0 where none could be sampled.
            ahead: Wait for them in a thread; else `await_tokens_received`, when they have been read, does.
        """
        self._report_ends()
        self.seconds_waited = 0.0
        (answers, where), self._last_gathered = (
            self._last_gathered,
            _NO_ANSWERS,
        )  # or none of them would be over
        if skipped:
            answers = [it for i, it in enumerate(answers) if i not in skipped]
            where = np.delete(where, [*skipped], axis=1)
        if not answers:
            return
        self._pending_answers, self._pending_indices = answers, where[0]
        # Before the tokens are sent, so that a mask of the last step is never used for this one.
        self._memory.states[self._pending_indices] = AnswerState.PENDING
        self._unsent_message = partial(_tokens_message, where, tokens)
        if send_now:
            self._send_tokens()

    @property
    def seconds_left(self) -> float:
        """Seconds that the present step may wait for the process if it has other rows; 0 while the
        process does not answer."""
        return 0.0 if self._is_stalled else max(0.0, self.max_wait_s - self.seconds_waited)

    @property
    def is_running(self) -> bool:
        """Whether the process runs or waits for something to do: it is not stopped, nor gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("R", "S")

    def await_tokens_received(self) -> set[Answer]:
        """Wait until the tokens that were `start`ed have been received, while `seconds_left`;
        return the answers that are over by then. The others may still be matched by threads:
        `await_end` and `gather_masks` tell. An interrupt must not break in."""
        if not self._pending_answers:
            return set()
        if self._unsent_message is not None:
            self._send_tokens()
        counts = self._memory.counts
        self._wait(lambda: counts[0] >= self._num_steps_sent, lambda: self.seconds_left == 0)
        answers, self._pending_answers = self._pending_answers, ()
        found = self._memory.states[self._pending_indices]
        over = [answers[i] for i in np.flatnonzero(found >= AnswerState.STOPPED).tolist()]
        for answer in over:
            self._note_end(answer)
        return set(over)

    def await_end(self, answer: Answer) -> bool:
        """Wait until an answer's last token is matched, while `seconds_left`; return whether the
        answer is over by it."""
        states = self._memory.states
        self._wait(
            lambda: states[answer.memory_index] >= AnswerState.READY, lambda: self.seconds_left == 0
        )
        if is_over := bool(states[answer.memory_index] >= AnswerState.STOPPED):
            self._note_end(answer)
        return is_over

    def _note_end(self, answer: Answer) -> None:
        answer.error = self.answer_error(answer)
        answer.is_stopped = answer.error is None

    def gather_masks(
        self,
        items: AnswerRows,
        num_rows: int,
        should_stop_waiting: ShouldStopWaiting = never_stop_waiting,
    ) -> tuple[np.ndarray, EndedAnswers, list[int]]:
        """Return the masks of a step. The tokens of all steps before it are sent.

        Args:
            items: Its answers with grammars.
            num_rows: Its rows.
            may_leave: Whether to wait no longer; asked now and then.

        Returns:
            int32 [num_rows, M], token `32 w + j` is bit `j` of word `w`, all ones in other rows,
            until the next call; the answers that are over; and the indices in `items` of those
            that were left. Rows of the last two hold anything.
        """
        answers = [answer for answer, _ in items]
        where = np.array([[it.memory_index for it in answers], [row for _, row in items]], np.int32)
        self._last_gathered, (indices, rows) = (answers, where), where
        found, late = self._memory.states[indices], list[int]()

        def is_done() -> bool:
            nonlocal found, late
            found = self._memory.states[indices]
            late = np.flatnonzero(found < AnswerState.READY).tolist()
            return not late

        def give_up() -> bool:
            return should_stop_waiting(late, np.flatnonzero(found == AnswerState.HEAVY).tolist())

        self._wait(is_done, give_up)
        over = np.flatnonzero(found >= AnswerState.STOPPED).tolist()
        for i in over:
            self._note_end(answers[i])
        memory_indices = np.zeros(num_rows, np.int64)  # place 0 allows all
        memory_indices[rows] = indices
        if len(self._buffer) != num_rows:
            self._buffer = np.empty((num_rows, self._memory.masks.shape[1]), np.int32)
        # All steps before are read, so that none needs what was there.
        np.take(self._memory.masks, memory_indices, axis=0, out=self._buffer, mode="clip")
        return self._buffer, [(i, answers[i].error) for i in over], late

    @property
    def worker_time_ns(self) -> np.ndarray:
        """int64 [2]: that taking tokens in, and making masks together, has taken the process."""
        return np.zeros(2, np.int64) if self._memory is None else self._memory.counts[1:].copy()

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none."""
        return None if self._worker is None else self._worker.process.pid

    def _start_worker(self) -> "_WorkerProcess":
        if not can_start_python():
            raise RuntimeError("structured_outputs needs a Python to start, and there is none")
        try:
            if self._memory is None:
                self._memory = MaskMemory(self._settings.capacity, self._settings.mask_width)
            worker = _WorkerProcess(self._memory.fd)
        # No more processes, threads, files, or memory that can be shared.
        except (OSError, RuntimeError, AttributeError) as error:
            words = f"structured_outputs: no process could be started: {error}"
            raise RuntimeError(words) from error
        self._memory.counts[0] = self._num_steps_sent = 0
        self._silent_s, self._polled_at, self._is_stalled = 0.0, time.monotonic(), False
        worker.put(
            partial(encode_message, MaskMessageKind.BEGIN, msgspec.json.encode(self._settings))
        )
        self._close_worker = weakref.finalize(self, worker.close)
        return worker

    def _allocate_indices(self, count: int) -> list[int]:
        """The lowest that are free: memory that was used is used again."""
        ending, self._reported_ends = self._reported_ends, []
        for memory_index in ending:
            if self._memory.states[memory_index] == AnswerState.FREE:
                heapq.heappush(self._free_indices, memory_index)
            else:
                self._reported_ends.append(memory_index)
        most = self._settings.capacity
        if count > len(self._free_indices) + most - self._num_used_indices:
            words = f"structured_outputs: there are {most - 1} answers at most: retry later"
            raise RuntimeError(words)
        taken = [
            heapq.heappop(self._free_indices) for _ in range(min(count, len(self._free_indices)))
        ]
        first_new = self._num_used_indices
        self._num_used_indices += count - len(taken)
        return [*taken, *range(first_new, self._num_used_indices)]

    def _report_ends(self) -> None:
        """Tell the process of answers that are over."""
        over = [self._unreported_ends.popleft() for _ in range(len(self._unreported_ends))]
        if over and self._worker is None:
            self._memory.states[over] = AnswerState.FREE
        elif over:
            self._worker.put(
                partial(encode_message, MaskMessageKind.END, np.array(over, np.int32).tobytes())
            )
        self._reported_ends += over

    def _send_tokens(self) -> None:
        if self._worker is not None:
            self._worker.put(self._unsent_message)
            self._num_steps_sent += 1
        self._unsent_message = None

    def _wait(self, is_done: Callable[[], bool], give_up: Callable[[], bool]) -> None:
        """Wait for the process, or until it has ended, and then nothing is pending."""
        if self._is_stalled:  # nothing may be waited for
            self._read_notifications()
            self._check_silence()
        polled_at = time.monotonic()
        while not is_done():
            if give_up():
                # A byte that was read during this wait may report an earlier step, so half of the
                # longest wait without a byte counts as silence.
                is_silent = self._silent_s >= self.max_wait_s / 2
                if is_silent and self.seconds_waited >= self.max_wait_s:
                    self._is_stalled = True
                return
            self._await_notification(
                _POLL_INTERVAL_S if self.seconds_waited < _FAST_POLL_S else _SLOW_POLL_INTERVAL_S
            )
            now = time.monotonic()
            self.seconds_waited += min(now - polled_at, _MAX_COUNTED_WAIT_S)
            polled_at = now
            self._check_silence()

    def _await_notification(self, seconds: float | None) -> None:
        """Wait until something has changed in the memory, or so long."""
        if self._worker is not None:
            select.select([self._worker.sock], [], [], seconds)
        self._read_notifications()

    def _read_notifications(self) -> None:
        """Note whether the process has told anything, or has ended."""
        if self._worker is None:
            return
        try:
            while self._worker.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                self._silent_s, self._is_stalled = 0.0, False
        except BlockingIOError:
            return
        except OSError:
            pass
        code = self._worker.exit_code(_EXIT_TIMEOUT_S)
        self._drop_worker("its socket was closed" if code is None else describe_exit(code))

    def _check_silence(self) -> None:
        """Something is pending: end a process that has said nothing for too long."""
        now = time.monotonic()
        self._silent_s += min(now - self._polled_at, _MAX_COUNTED_SILENCE_S)
        self._polled_at = now
        if self._worker is not None and self._silent_s > self.silence_timeout_s:
            self._drop_worker(f"no progress for {self.silence_timeout_s:g} s")

    def _drop_worker(self, reason: str) -> None:
        self._close_worker()
        self._worker = None
        self._memory.drop_reason = reason
        states = self._memory.states[: self._num_used_indices]
        states[states != AnswerState.FREE] = AnswerState.DROPPED
        states[0] = AnswerState.FREE
        states[self._reported_ends] = AnswerState.FREE
        self._memory.counts[0] = self._num_steps_sent


class _WorkerProcess(Child):
    """The process, and the thread that sends: it alone waits, for the device and for a process that
    is slow to read. The thread closes the channel.

    Attributes:
        put: Have a message made and sent.
    """

    def __init__(self, fd: int):
        module = "jpaged.structured_outputs.mask_worker"
        super().__init__(module, fd, pass_fds=[fd], is_group_leader=True)  # Ctrl-C is the engine's
        queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self.put = queue.put
        try:
            if self.sock.fileno() >= MAX_OPEN_FILES:
                raise OSError(f"{MAX_OPEN_FILES} files are open, and `select` takes no more")
            threading.Thread(
                target=_send_all, args=(self.sock, queue), name="jpaged-masks", daemon=True
            ).start()
        except BaseException:  # an interrupt, too
            self.put(None)
            self.kill_and_close()
            raise

    def close(self) -> None:
        """End the process and the thread; in a fork of the engine's process, which has neither,
        close the fork's copy of the channel alone."""
        if self.kill():
            self.put(None)
        else:
            self.sock.close()


def _send_all(sock: socket.socket, queue: SimpleQueue[Callable[[], bytes] | None]) -> None:
    """Send what is in the queue, until None is; then close the socket."""
    with sock:
        while (message := queue.get()) is not None:
            try:
                sock.sendall(message())
            except OSError:  # the process has ended, which the engine will hear
                with suppress(OSError):  # or it would take what follows a cut message for a message
                    sock.shutdown(socket.SHUT_RDWR)
            message = None  # a step's arrays are not kept


def _tokens_message(where: np.ndarray, tokens: Callable[[], np.ndarray]) -> bytes:
    """Of answers at some places, and the rows of a step: int32 [2, n]."""
    try:
        found = tokens().tobytes()
    except BaseException:  # the engine learns it when it reads the step
        found = np.full(where.max() + 1, -1, np.int32).tobytes()
    return encode_message(MaskMessageKind.TOKENS, where.tobytes(), found, count=where.shape[1])
