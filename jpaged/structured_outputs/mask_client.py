"""The engine's side of the mask worker, the process that compiles grammars and makes masks.

A mask says which tokens the grammar of an answer allows next. Python code that made the masks in
the engine's process would hold the GIL while the engine launches steps. With 64 rows, the engine
would lose more time to the GIL than the masks take. Therefore, a separate process makes the masks:
the mask worker (`mask_worker.py`), which starts with the first grammar.

A thread of the engine waits for the device and sends sampled tokens to the mask worker over a
socket. The states of answers and their masks are in shared memory.

If the mask worker ends, requests with grammars fail, and the next request with a grammar starts a
new mask worker. If the mask worker does not respond, a step waits a limited time (`max_wait_s` of
`MaskWorkerClient`). The step then runs without the rows that have grammars.
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
from jpaged.structured_outputs.mask_memory import (
    AnswerState,
    MaskJob,
    MaskMemory,
    MaskMessageKind,
    MaskWorkerSettings,
    encode_message,
)
from jpaged.structured_outputs.matcher import GrammarError

AnswerRows = Sequence[tuple["Answer", int]]
"""Answers with grammars, and the row of each answer in a step."""

EndedAnswers = list[tuple[int, GrammarError | None]]
"""For each answer that is over: its index in `AnswerRows`, and its error or None if complete."""

ShouldStopWaiting = Callable[[Sequence[int], Collection[int]], bool]
"""Function that returns whether a step stops waiting for masks.

The first argument has the indices in `AnswerRows` of all answers without masks. The second argument
has the indices of those answers whose state is `AnswerState.HEAVY`: their masks are slow to make.
"""


def never_stop_waiting(late: Sequence[int], heavy: Collection[int]) -> bool:
    """Return False, so that a step waits for all masks. Implements `ShouldStopWaiting`."""
    return False


_NO_ANSWERS: tuple[Sequence["Answer"], np.ndarray] = (), np.zeros((2, 0), np.int32)
"""An empty list of answers, and an empty int32 array [2, 0] of `MaskMemory` indices and rows."""

_POLL_INTERVAL_S = 5e-5
"""Seconds between two checks of whether the masks of a waiting step have arrived."""

_FAST_POLL_S, _SLOW_POLL_INTERVAL_S = 5e-3, 1e-3
"""A step that waits for masks checks every `_POLL_INTERVAL_S` seconds at first.

After `_FAST_POLL_S` seconds, the step checks only every `_SLOW_POLL_INTERVAL_S` seconds."""

MAX_OPEN_FILES = 1024
"""Maximum number of open files with which `select` works.

`select` is used because the alternatives wait for at least a millisecond."""

_MAX_COUNTED_SILENCE_S = 1.0
"""Maximum seconds that the time between two checks adds to the silence of the mask worker.

If more time passes, the engine itself was stopped, for example by Ctrl-Z."""

_EXIT_TIMEOUT_S = 0.5
"""Maximum seconds to wait for the exit code of a mask worker that has closed its socket."""

_MAX_COUNTED_WAIT_S = 0.01
"""Maximum seconds that the time between two checks adds to a step's wait for the mask worker.

If more time passes, the engine got no CPU, so the mask worker may have got no CPU either."""


class Answer:
    """An answer that must match a grammar: the output of one sequence.

    Attributes:
        memory_index: Index of the answer's entry in the `MaskMemory` (shared memory).
        is_stopped: Whether the answer is complete.
        error: Error of a failed answer, otherwise None.
    """

    __slots__ = ("__weakref__", "error", "is_stopped", "memory_index")

    def __init__(self, memory_index: int):
        self.memory_index = memory_index
        self.is_stopped = False
        self.error: GrammarError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete or has failed."""
        return self.is_stopped or self.error is not None


class Constraint:
    """The grammar of a request, which the mask worker compiles.

    Attributes:
        answers: One `Answer` per sample of the request.
    """

    def __init__(self, client: "MaskWorkerClient", answers: list[Answer]):
        self.answers, self._client = answers, client

    @property
    def is_ready(self) -> bool:
        """Whether every answer has either failed, or has a compiled grammar and a mask."""
        return self._client.are_ready(self.answers)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until `is_ready` is true, at most for `seconds`."""
        self._client.wait_for(self.answers, seconds)

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the token ids that the last mask of an answer allows."""
        return self._client.allowed_ids(answer)

    def check(self) -> None:
        """Wait until the grammar is compiled.

        Raises:
            GrammarError: The grammar cannot be compiled, or the mask worker has ended.
        """
        self.wait()
        for answer in self.answers:
            if (error := self._client.answer_error(answer)) is not None:
                raise error


class MaskWorkerClient:
    """Client of the mask worker: starts the worker, sends tokens and reads masks. Not thread-safe.

    The mask worker is a process that compiles grammars and makes masks of the allowed tokens.

    Args:
        folder: Folder of the tokenizer.
        vocab_size: Width of the logits. Token ids that the tokenizer lacks are never allowed.
        eos_token_ids: The model's end tokens.
        capacity: Number of entries in the shared memory, one per answer. The number must exceed the
            number of answers, including the answers of waiting requests. Unused entries take no
            memory.
        max_wait_s: Maximum seconds that a step waits for the worker if some rows of the step have
            no grammar.
        silence_timeout_s: Maximum seconds without a report from the worker while an answer waits
            for the worker. The client then kills the worker. The time that the worker needs to
            start counts too.

    Attributes:
        max_wait_s, silence_timeout_s: See the arguments.
        seconds_waited: Seconds that the current step has waited for the worker so far.
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
        # Whether a step has waited for `max_wait_s` seconds without success, and the mask worker
        # has reported nothing since then.
        self._is_stalled = False
        # A `MaskMemory`; None before the first grammar.
        self._memory: Any = None
        # A `_WorkerProcess`; None while no mask worker runs.
        self._worker: Any = None
        # `MaskMemory` indices below `_num_used_indices` have been used at some time.
        # `_free_indices` is a heap of the used indices that are free again.
        self._num_used_indices, self._free_indices = 1, list[int]()
        # `MaskMemory` indices of answers that are over. The indices in `_unreported_ends` have not
        # been sent to the mask worker yet. The indices in `_reported_ends` have been sent, but the
        # mask worker may still use the entries.
        self._unreported_ends: deque[int] = deque()
        self._reported_ends: list[int] = []
        self._last_gathered = _NO_ANSWERS
        self._pending_answers: Sequence[Answer] = ()
        # int32 [n]: the `MaskMemory` index of each answer in `_pending_answers`.
        self._pending_indices: Any = None
        self._unsent_message: Callable[[], bytes] | None = None
        # Number of steps whose tokens were sent to the current mask worker.
        self._num_steps_sent = 0
        # `_silent_s` counts the seconds without a report from the mask worker while an answer was
        # pending. `_polled_at` is the time of the last check.
        self._silent_s = self._polled_at = 0.0
        self._buffer = np.zeros((0, 0), np.int32)

    def submit(
        self, spec: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Constraint:
        """Start to compile a grammar for `count` answers.

        Args:
            spec: The structured-output specification.
            ending_ids: Token ids that may end an answer.
            count: Number of answers.

        Raises:
            RuntimeError: The mask worker cannot be started, or there are too many answers.
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
        """Return whether every answer has its next mask, is complete or has failed."""
        states = self._memory.states
        if any(states[it.memory_index] < AnswerState.READY for it in answers):
            self._read_notifications()
            self._check_silence()
        return all(states[it.memory_index] >= AnswerState.READY for it in answers)

    def wait_for(self, answers: Sequence[Answer], seconds: float | None) -> None:
        """Wait until `are_ready` returns True, at most for `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.are_ready(answers) and (until is None or time.monotonic() < until):
            self._await_notification(
                min(_MAX_COUNTED_SILENCE_S, _MAX_COUNTED_SILENCE_S if seconds is None else seconds)
            )

    def answer_error(self, answer: Answer) -> GrammarError | None:
        """Return the error that made an answer fail; None if the answer has not failed."""
        if self._memory.states[answer.memory_index] < AnswerState.FAILED:
            return None
        return self._memory.read_error(answer.memory_index)

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the token ids that the last mask of an answer allows."""
        mask = self._memory.masks[answer.memory_index].view(np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()

    def request_masks(
        self, skipped: Collection[int], tokens: Callable[[], np.ndarray], *, send_now: bool
    ) -> None:
        """Send the tokens of the current step to the mask worker, which then makes the next masks.

        The current step is the step of the last call of `gather_masks`.

        Args:
            skipped: Answers that need no next mask, as indices into the argument `items` of
                `gather_masks`.
            tokens: Function that waits for the tokens of the current step and returns the tokens:
                int32 [rows]. A negative token means that no token could be sampled.
            send_now: Whether another thread sends the tokens as soon as the tokens are known.
                Otherwise, `await_tokens_received` sends the tokens later.
        """
        self._report_ends()
        self.seconds_waited = 0.0
        # Drop the references to the answers. When an answer is garbage-collected, the client
        # reports the end of the answer to the mask worker.
        (answers, where), self._last_gathered = self._last_gathered, _NO_ANSWERS
        if skipped:
            answers = [it for i, it in enumerate(answers) if i not in skipped]
            where = np.delete(where, [*skipped], axis=1)
        if not answers:
            return
        self._pending_answers, self._pending_indices = answers, where[0]
        # Set the states of the answers to PENDING before the tokens are sent. Otherwise, the next
        # step might use old masks.
        self._memory.states[self._pending_indices] = AnswerState.PENDING
        self._unsent_message = partial(_tokens_message, where, tokens)
        if send_now:
            self._send_tokens()

    @property
    def seconds_left(self) -> float:
        """Seconds of `max_wait_s` that the current step may still wait for the mask worker.

        0 while the mask worker is stalled: after a step has waited without success, later steps do
        not wait at all. Steps wait again once the mask worker has reported something.
        """
        return 0.0 if self._is_stalled else max(0.0, self.max_wait_s - self.seconds_waited)

    @property
    def is_running(self) -> bool:
        """Whether the mask worker is alive and not suspended (state R or S in /proc)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("R", "S")

    def await_tokens_received(self) -> set[Answer]:
        """Wait until the mask worker has received a step's tokens, at most for `seconds_left`.

        The caller must delay a KeyboardInterrupt until this method has returned.

        Returns:
            The answers that are complete or have failed. For other answers, threads of the mask
            worker may still be matching tokens; `await_end` and `gather_masks` wait for the
            threads.
        """
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
        """Wait until the mask worker has matched the token that was sent last for an answer.

        Wait at most for `seconds_left`.

        Returns:
            Whether the answer is complete or has failed.
        """
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
        """Wait for the masks of a step, and return the masks.

        The tokens of all earlier steps must have been sent.

        Args:
            items: Answers with grammars in the step, and their rows.
            num_rows: Number of rows of the step.
            should_stop_waiting: Function that the method calls repeatedly during the wait. If the
                function returns True, the method stops waiting.

        Returns:
            A tuple of three:

            - The masks, int32 [num_rows, M]: bit `j` of word `w` is token `32 w + j`. Rows without
              grammars are all ones. The array is valid until the next call.
            - The index in `items` of each answer that is over, and the answer's error or None.
            - The indices in `items` of answers whose masks are late.

            Mask rows of ended and late answers have arbitrary contents.
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
        memory_indices = np.zeros(num_rows, np.int64)  # mask 0 allows every token
        memory_indices[rows] = indices
        if len(self._buffer) != num_rows:
            self._buffer = np.empty((num_rows, self._memory.masks.shape[1]), np.int32)
        # The buffer can be overwritten, because the device has finished with the masks of all
        # earlier steps.
        np.take(self._memory.masks, memory_indices, axis=0, out=self._buffer, mode="clip")
        return self._buffer, [(i, answers[i].error) for i in over], late

    @property
    def worker_time_ns(self) -> np.ndarray:
        """Nanoseconds that the mask worker spent on matching tokens and on masks, int64 [2]."""
        return np.zeros(2, np.int64) if self._memory is None else self._memory.counts[1:].copy()

    @property
    def pid(self) -> int | None:
        """Process id of the mask worker; None if no worker runs."""
        return None if self._worker is None else self._worker.process.pid

    def _start_worker(self) -> "_WorkerProcess":
        if not can_start_python():
            raise RuntimeError(
                "structured_outputs needs a Python interpreter to start the mask worker, and this "
                "program has none: run jpaged with Python"
            )
        try:
            if self._memory is None:
                self._memory = MaskMemory(self._settings.capacity, self._settings.mask_width)
            worker = _WorkerProcess(self._memory.fd)
        # These errors mean that the system cannot create another process, thread, file or shared
        # memory.
        except (OSError, RuntimeError, AttributeError) as error:
            words = f"structured_outputs: the mask worker could not be started: {error}"
            raise RuntimeError(words) from error
        self._memory.counts[0] = self._num_steps_sent = 0
        self._silent_s, self._polled_at, self._is_stalled = 0.0, time.monotonic(), False
        worker.put(
            partial(encode_message, MaskMessageKind.BEGIN, msgspec.json.encode(self._settings))
        )
        self._close_worker = weakref.finalize(self, worker.close)
        return worker

    def _allocate_indices(self, count: int) -> list[int]:
        """Return the `count` lowest free indices of the `MaskMemory`.

        Low indices use few pages of memory.
        """
        ending, self._reported_ends = self._reported_ends, []
        for memory_index in ending:
            if self._memory.states[memory_index] == AnswerState.FREE:
                heapq.heappush(self._free_indices, memory_index)
            else:
                self._reported_ends.append(memory_index)
        most = self._settings.capacity
        if count > len(self._free_indices) + most - self._num_used_indices:
            words = f"structured_outputs: at most {most - 1} answers can run or wait: retry later"
            raise RuntimeError(words)
        taken = [
            heapq.heappop(self._free_indices) for _ in range(min(count, len(self._free_indices)))
        ]
        first_new = self._num_used_indices
        self._num_used_indices += count - len(taken)
        return [*taken, *range(first_new, self._num_used_indices)]

    def _report_ends(self) -> None:
        """Send the mask worker the `MaskMemory` indices of answers that are over."""
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
        """Wait until `is_done()` or `give_up()` returns True.

        If the mask worker ends during the wait, all answers fail, so that `is_done()` returns True.
        """
        # Read the mask worker's reports, because the loop below may end without reading a report.
        if self._is_stalled:
            self._read_notifications()
            self._check_silence()
        polled_at = time.monotonic()
        while not is_done():
            if give_up():
                # The mask worker is stalled if no report arrived in the second half of
                # `max_wait_s`. A late report about an earlier step may arrive in the first half.
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
        """Wait at most `seconds` until the mask worker reports a change in the shared memory."""
        if self._worker is not None:
            select.select([self._worker.sock], [], [], seconds)
        self._read_notifications()

    def _read_notifications(self) -> None:
        """Read the mask worker's reports. Drop a worker that has closed the socket."""
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
        """Drop the mask worker if an answer has waited too long without any report."""
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
    """The mask worker's process, and a thread that sends messages to the process.

    A message may have to wait until the device has computed tokens, or until a slow mask worker has
    read earlier messages. The thread waits instead of the engine.

    Attributes:
        put: Function that adds a message to the thread's queue. The argument is a function that
            returns the bytes of the message; the thread calls this function. `put(None)` ends the
            thread, which then closes the socket.
    """

    def __init__(self, fd: int):
        module = "jpaged.structured_outputs.mask_worker"
        # The mask worker leads its own process group, so that a Ctrl-C in the terminal reaches only
        # the engine.
        super().__init__(module, fd, pass_fds=[fd], is_group_leader=True)
        queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self.put = queue.put
        try:
            if self.sock.fileno() >= MAX_OPEN_FILES:
                raise OSError(
                    f"this process has {MAX_OPEN_FILES} open files, the maximum for select: "
                    "close some files"
                )
            threading.Thread(
                target=_send_all, args=(self.sock, queue), name="jpaged-masks", daemon=True
            ).start()
        except BaseException:  # also after a KeyboardInterrupt
            self.put(None)
            self.kill_and_close()
            raise

    def close(self) -> None:
        """Kill the mask worker's process, and end the thread that sends messages.

        In a fork of the engine's process, only close the fork's copy of the socket.
        """
        if self.kill():
            self.put(None)
        else:
            self.sock.close()


def _send_all(sock: socket.socket, queue: SimpleQueue[Callable[[], bytes] | None]) -> None:
    """Send queued messages until None is queued, then close the socket."""
    with sock:
        while (message := queue.get()) is not None:
            try:
                sock.sendall(message())
            except OSError:
                # The mask worker has ended, and `_read_notifications` will notice that. Send no
                # further message, because the last message may be incomplete.
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            message = None  # drop the reference to the step's arrays while the thread waits


def _tokens_message(where: np.ndarray, tokens: Callable[[], np.ndarray]) -> bytes:
    """Return the message that sends the sampled tokens of a step to the mask worker.

    Args:
        where: int32 [2, n]. `where[0]` has the index of each answer in the `MaskMemory`, and
            `where[1]` the row of each answer in the step.
        tokens: Function that waits for the step's tokens and returns the tokens, int32 [rows].
    """
    try:
        found = tokens().tobytes()
    # Ignore the error and send -1 as every token. The engine also reads the step's tokens, gets the
    # same error, and handles the error.
    except BaseException:
        found = np.full(where.max() + 1, -1, np.int32).tobytes()
    return encode_message(MaskMessageKind.TOKENS, where.tobytes(), found, count=where.shape[1])
