"""The process that compiles grammars and makes masks: what of it runs in the engine.

What runs Python in the engine's process takes Python's lock from the thread that launches steps:
with 64 rows that cost more than the masks. So matchers and masks have a process of their own
(`masks.py`), started with the first grammar that is asked for. Tokens go there over a socket, by a
thread that waits for the device; the state of answers and their masks are in memory that both
share. Where that process ends, whatever ends it, requests with grammars fail, and the next one
starts it again.
"""

import heapq
import os
import select
import socket
import subprocess
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

from jpaged.processes import has_python, python_command
from jpaged.structured_outputs import StructuredOutputs
from jpaged.text.grammar import GrammarError
from jpaged.text.masks import Kind, MaskMemory, Order, Settings, State, frame

Items = Sequence[tuple["Answer", int]]
"""Answers, and the row of each."""

Failed = list[tuple[int, GrammarError]]
"""The indices in `Items` of those that fail, and why."""

_NONE: tuple[Sequence["Answer"], np.ndarray] = (), np.zeros((2, 0), np.int32)
"""Answers; their places, and their rows."""

_LOOK = 5e-5
"""Seconds until those who wait for masks are asked again whether they would."""

_MOST_FILES = 1024
"""Open at once, for `select`: no other call waits for less than a millisecond."""

_LONGEST_LOOK = 1.0
"""Seconds that count between two looks at a process that says nothing: this one may have been
stopped for longer, as by Ctrl-Z."""

_MOST_LEFT = 0.25
"""Of a step's rows: so many may sit it out because their masks are not there."""

_LONGEST_STEP = 0.05
"""Seconds that a step is taken to last at most, where the time between two was longer."""


class Answer:
    """An answer that obeys a grammar.

    Attributes:
        place: Its own in the memory.
        is_stopped: Nothing may follow.
        error: Why it fails.
    """

    __slots__ = ("__weakref__", "error", "is_stopped", "place")

    def __init__(self, place: int):
        self.place = place
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

    def __init__(self, process: "MaskProcess", answers: list[Answer]):
        self.answers, self._process = answers, process

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._process.are_made(self.answers)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is ready, or so long."""
        self._process.wait_for(self.answers, seconds)

    def check(self) -> None:
        """Wait until it is ready; GrammarError if the grammar cannot be compiled."""
        self.wait()
        for answer in self.answers:
            if (error := self._process.error_of(answer)) is not None:
                raise error


class MaskProcess:
    """The process, and the answers in it. Not thread-safe.

    Args:
        folder: Of the tokenizer.
        vocab_size: Width of the logits; ids above the tokenizer's own are never allowed.
        eos_token_ids: The model's own end tokens.
        places: One more than there are answers at most, those that wait for their turn among them.
            Only what was used of them takes memory.
        longest_wait: Seconds for a step's tokens to be taken in, or masks made: a process that
            hangs is ended.
        longest_silence: Seconds that it may say nothing while a grammar is to be compiled, its
            start among them.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        places: int = 1 << 16,
        longest_wait: float = 30.0,
        longest_silence: float = 30.0,
    ):
        width = -(-vocab_size // 32)
        self._settings = Settings(str(folder), vocab_size, eos_token_ids, places, width)
        self._longest_wait, self._longest_silence = longest_wait, longest_silence
        self._memory: Any = None  # a MaskMemory, since the first grammar
        self._line: Any = None  # a _Line to the process, where there is one
        self._num_places, self._free = 1, list[int]()  # that were ever used; a heap of free ones
        self._over: deque[int] = deque()  # of answers that are gone, the process not told yet
        self._ending: list[int] = []  # told, and not free yet
        self._gathered = _NONE
        self._started: Sequence[Answer] = ()
        self._where: Any = None  # int32 [n]: places of those
        self._due: Callable[[], bytes] | None = None
        self._num_sent = 0  # steps' tokens
        self._silence = self._looked = 0.0  # seconds without news of what is pending; when seen
        self._buffer = np.zeros((0, 0), np.int32)

    def submit(
        self, form: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Constraint:
        """Begin to compile a form for so many answers, which tokens `ending_ids` may end.

        Raises:
            RuntimeError: no process can be started, or there are too many answers.
        """
        self._hear()
        line = self._line = self._line or self._start()
        self._tell_over()
        places = self._take_places(count)
        self._memory.states[places] = State.PENDING
        answers = [Answer(place) for place in places]
        for answer in answers:
            weakref.finalize(answer, self._over.append, answer.place).atexit = False
        order = Order(form, places, ending_ids)
        line.put(partial(frame, Kind.BEGIN, msgspec.json.encode(order)))
        return Constraint(self, answers)

    def are_made(self, answers: Sequence[Answer]) -> bool:
        """Whether the masks of some answers are made, or cannot be."""
        states = self._memory.states
        if any(states[it.place] == State.PENDING for it in answers):
            self._hear()
            self._limit_silence()
        return all(states[it.place] != State.PENDING for it in answers)

    def wait_for(self, answers: Sequence[Answer], seconds: float | None) -> None:
        """Wait until they are, or so long."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.are_made(answers) and (until is None or time.monotonic() < until):
            self._await_news(min(_LONGEST_LOOK, _LONGEST_LOOK if seconds is None else seconds))

    def error_of(self, answer: Answer) -> GrammarError | None:
        """Why an answer fails."""
        if self._memory.states[answer.place] < State.FAILED:
            return None
        return self._memory.error(answer.place)

    def start(
        self, left: Collection[int], tokens: Callable[[], np.ndarray], *, ahead: bool
    ) -> None:
        """Begin with the masks behind a step's tokens, which the engine has not read.

        Args:
            left: Indices of those in `gather`'s items that get none.
            tokens: Waits for the step's tokens, int32 [rows]; below 0 where none could be sampled.
            ahead: Wait for them in a thread; else `await_taken`, when they have been read, does.
        """
        self._tell_over()
        (answers, where), self._gathered = self._gathered, _NONE  # or none of them would be over
        if left:
            answers = [it for i, it in enumerate(answers) if i not in left]
            where = np.delete(where, [*left], axis=1)
        if not answers:
            return
        self._started, self._where = answers, where[0]
        self._due = partial(_tokens_message, where, tokens)
        if ahead:
            self._send_due()

    def await_taken(self) -> set[Answer]:
        """Wait until tokens that were `start`ed are taken in; those answers that are over by them.
        An interrupt must not break in."""
        if not self._started:
            return set()
        if self._due is not None:
            self._send_due()
        counts = self._memory.counts
        self._wait(lambda: counts[0] >= self._num_sent)
        answers, self._started = self._started, ()
        found = self._memory.states[self._where]
        over = [answers[i] for i in np.flatnonzero(found >= State.STOPPED).tolist()]
        for answer in over:
            answer.error = self.error_of(answer)
            answer.is_stopped = answer.error is None
        return set(over)

    def gather(
        self, items: Items, num_rows: int, may_leave: Callable[[Sequence[int]], bool] | None
    ) -> tuple[np.ndarray, Failed, list[int]]:
        """The masks of a step. All tokens before it are taken in.

        Args:
            items: Its answers with grammars.
            num_rows: Its rows.
            may_leave: Whether to wait no longer for those at some indices in `items`; asked now and
                then. None: all are waited for.

        Returns:
            int32 [num_rows, M], token `32 w + j` is bit `j` of word `w`, all ones in other rows,
            until the next call; the indices in `items` of those that fail, and why; and of those
            that were left. Rows of the last two hold anything.
        """
        answers = [answer for answer, _ in items]
        where = np.array([[it.place for it in answers], [row for _, row in items]], np.int32)
        self._gathered, (own, rows) = (answers, where), where
        found, late = self._memory.states[own], list[int]()

        def is_done() -> bool:
            nonlocal found, late
            found = self._memory.states[own]
            late = np.flatnonzero(found == State.PENDING).tolist()
            return not late

        self._wait(is_done, None if may_leave is None else lambda: may_leave(late))
        bad = np.flatnonzero(found >= State.FAILED).tolist()
        failed = [(i, self._memory.error(int(own[i]))) for i in bad]
        places = np.zeros(num_rows, np.int64)  # place 0 allows all
        places[rows] = own
        if len(self._buffer) != num_rows:
            self._buffer = np.empty((num_rows, self._memory.masks.shape[1]), np.int32)
        # All steps before are read, so that none needs what was there.
        np.take(self._memory.masks, places, axis=0, out=self._buffer, mode="clip")
        return self._buffer, failed, late

    @property
    def nanoseconds(self) -> np.ndarray:
        """int64 [2]: that taking tokens in, and making masks together, has taken the process."""
        return np.zeros(2, np.int64) if self._memory is None else self._memory.counts[1:].copy()

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none."""
        return None if self._line is None else self._line.process.pid

    def _start(self) -> "_Line":
        if not has_python():
            raise RuntimeError("structured_outputs needs a Python to start, and there is none")
        try:
            if self._memory is None:
                self._memory = MaskMemory(self._settings.places, self._settings.mask_width)
            line = _Line(self._memory.file)
        # No more processes, threads, files, or memory that can be shared.
        except (OSError, RuntimeError, AttributeError) as error:
            words = f"structured_outputs: no process could be started: {error}"
            raise RuntimeError(words) from error
        self._memory.counts[0] = self._num_sent = 0
        self._silence, self._looked = 0.0, time.monotonic()
        line.put(partial(frame, Kind.BEGIN, msgspec.json.encode(self._settings)))
        self._end_line = weakref.finalize(self, line.close)
        return line

    def _take_places(self, count: int) -> list[int]:
        """The lowest that are free: memory that was used is used again."""
        ending, self._ending = self._ending, []
        for place in ending:
            if self._memory.states[place] == State.FREE:
                heapq.heappush(self._free, place)
            else:
                self._ending.append(place)
        most = self._settings.places
        if count > len(self._free) + most - self._num_places:
            words = f"structured_outputs: there are {most - 1} answers at most: retry later"
            raise RuntimeError(words)
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        first_new = self._num_places
        self._num_places += count - len(taken)
        return [*taken, *range(first_new, self._num_places)]

    def _tell_over(self) -> None:
        """Tell the process of answers that are over."""
        over = [self._over.popleft() for _ in range(len(self._over))]
        if over and self._line is None:
            self._memory.states[over] = State.FREE
        elif over:
            self._line.put(partial(frame, Kind.END, np.array(over, np.int32).tobytes()))
        self._ending += over

    def _send_due(self) -> None:
        if self._line is not None:
            self._line.put(self._due)
            self._num_sent += 1
        self._due = None

    def _wait(self, is_done: Callable[[], bool], give_up: Callable[[], bool] | None = None) -> None:
        """Wait for what the process does, or until it has ended, and then nothing is pending."""
        until = None
        while not is_done():
            if give_up is not None and give_up():
                return
            until = until or time.monotonic() + self._longest_wait
            self._await_news(self._longest_wait if give_up is None else _LOOK)
            if time.monotonic() > until and not is_done():
                self._lose()

    def _await_news(self, seconds: float | None) -> None:
        """Wait until something has changed in the memory, or so long."""
        if self._line is not None:
            select.select([self._line.sock], [], [], seconds)
        self._hear()

    def _hear(self) -> None:
        """Note that the process has ended, if it has."""
        if self._line is None:
            return
        told = self._line.take_news()
        if told is None:
            self._lose()
        elif told:
            self._silence = 0.0

    def _limit_silence(self) -> None:
        """Something is pending: end a process that has said nothing for too long."""
        now = time.monotonic()
        self._silence += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        if self._line is not None and self._silence > self._longest_silence:
            self._lose()

    def _lose(self) -> None:
        self._end_line()
        self._line = None
        states = self._memory.states[: self._num_places]
        states[states != State.FREE] = State.LOST
        states[0] = State.FREE
        states[self._ending] = State.FREE
        self._memory.counts[0] = self._num_sent


class _Line:
    """A process, the socket to it, and the thread that sends: it alone waits, for the device and
    for a process that is slow to read."""

    def __init__(self, file: int):
        self._owner = os.getpid()
        self.sock, theirs = socket.socketpair()
        if self.sock.fileno() >= _MOST_FILES:
            with self.sock, theirs:
                raise OSError(f"{_MOST_FILES} files are open, and `select` takes no more")
        self._queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        sending = threading.Thread(
            target=_send_all, args=(self.sock, self._queue), name="jpaged-masks", daemon=True
        )
        sending.start()
        with theirs:
            code = f"from jpaged.text.masks import main\nmain({theirs.fileno()}, {file})"
            try:
                self.process = subprocess.Popen(
                    python_command(code),
                    pass_fds=[theirs.fileno(), file],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is the engine's
                )
            except BaseException:  # an interrupt, too: without the socket the process ends
                self._queue.put(None)
                raise

    def put(self, message: Callable[[], bytes]) -> None:
        """Have a message made and sent."""
        self._queue.put(message)

    def take_news(self) -> bool | None:
        """Whether it told anything since the last time; None if it has ended."""
        has_told = False
        try:
            while self.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                has_told = True
        except BlockingIOError:
            return has_told
        except OSError:
            pass
        return None

    def close(self) -> None:
        """End the process and the thread; in a fork of the engine's process, which has neither,
        only the fork's part in the socket."""
        if os.getpid() != self._owner:
            self.sock.close()
            return
        self._queue.put(None)
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _send_all(sock: socket.socket, queue: SimpleQueue[Callable[[], bytes] | None]) -> None:
    """Send what is in the queue, until None is; then close the socket."""
    with sock:
        while (message := queue.get()) is not None:
            with suppress(OSError):  # the process has ended, which the engine will hear
                sock.sendall(message())
            message = None  # a step's arrays are not kept


def _tokens_message(where: np.ndarray, tokens: Callable[[], np.ndarray]) -> bytes:
    """Of answers at some places, and the rows of a step: int32 [2, n]."""
    try:
        found = tokens().tobytes()
    except BaseException:  # the engine learns it when it reads the step
        found = np.full(where.max() + 1, -1, np.int32).tobytes()
    return frame(Kind.TOKENS, where.tobytes() + found, where.shape[1])


class Patience:
    """How long a step waits for some rows' masks.

    As long as the host has just waited for the device, which is then ahead of it as much less. And
    longer by as large a share of a step as these rows are of its rows: then the waiting has cost
    all rows what those lose that sit it out.
    """

    def __init__(self):
        self._began = self._step_began = time.perf_counter()
        self._slack = self._step_seconds = 0.0

    def begin(self, slack: float) -> None:
        """A step begins to wait; so many seconds the host has waited for the device."""
        self._began, self._slack = time.perf_counter(), slack

    def is_over(self, share: float) -> bool:
        """Whether a share of the rows is not waited for any more."""
        seconds = self._slack + share * self._step_seconds
        return share <= _MOST_LEFT and time.perf_counter() - self._began >= seconds

    def note_step(self) -> None:
        """The step does not wait any more."""
        now = time.perf_counter()
        self._step_seconds = min(now - self._step_began, _LONGEST_STEP)
        self._step_began = now
