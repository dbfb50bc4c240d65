"""The process that compiles grammars and makes masks: what of it runs in the engine.

What runs Python in the engine's process takes Python's lock from the thread that launches steps:
with 64 rows that cost more than the masks. So matchers and masks have a process of their own
(`mask_worker.py`), started with the first grammar that is asked for. Tokens go there over a socket,
by a thread that waits for the device; the state of answers and their masks are in memory that both
share. Where that process ends, whatever ends it, requests with grammars fail, and the next one
starts it again. Where it does not answer, as a stopped process does not, a step waits for it no
longer than `longest_wait`; the engine goes on without these rows.
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

from jpaged.processes import Child, describe_exit, has_python
from jpaged.structured_outputs import StructuredOutputs
from jpaged.structured_outputs.mask_worker import Kind, MaskMemory, Order, Settings, State, frame
from jpaged.structured_outputs.matcher import GrammarError

Items = Sequence[tuple["Answer", int]]
"""Answers, and the row of each."""

Over = list[tuple[int, GrammarError | None]]
"""Indices in `Items` of the answers that are over; why they fail, or None if they are complete."""

MayLeave = Callable[[Sequence[int], Collection[int]], bool]
"""Whether a step waits no longer: called with the indices in `Items` of the answers whose masks are
not made, and of those among them that are heavy (`State.HEAVY`)."""


def wait_for_all(late: Sequence[int], heavy: Collection[int]) -> bool:
    """Wait until all masks are made, as a `MayLeave`."""
    return False


_NONE: tuple[Sequence["Answer"], np.ndarray] = (), np.zeros((2, 0), np.int32)
"""Answers; their places, and their rows."""

_LOOK = 5e-5
"""Seconds between two checks of whether a step still waits for masks."""

_SHORT_WAIT, _RARE_LOOK = 5e-3, 1e-3
"""After `_SHORT_WAIT` seconds of waiting, the checks are `_RARE_LOOK` seconds apart."""

MOST_FILES = 1024
"""Open at once, for `select`: no other call waits for less than a millisecond."""

_LONGEST_LOOK = 1.0
"""Seconds that count between two looks at a process that says nothing: this one may have been
stopped for longer, as by Ctrl-Z."""

_EXIT_SECONDS = 0.5
"""Maximum wait for the exit code of a mask worker that has closed its socket."""

_LONGEST_PAUSE = 0.01
"""Maximum of the seconds between two looks that count as waiting for the process: where this
process was not running either, the other one may have had no processor."""


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

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the tokens that the grammar allows next, as of the last mask of one answer."""
        return self._process.allowed_ids(answer)

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
        places: int = 1 << 16,
        longest_wait: float = 0.1,
        longest_silence: float = 30.0,
    ):
        width = -(-vocab_size // 32)
        self._settings = Settings(str(folder), vocab_size, eos_token_ids, places, width)
        self.longest_wait, self.longest_silence = longest_wait, longest_silence
        self.seconds_waited = 0.0
        self._is_stalled = False  # it told nothing while a step waited for it, nor since
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
        if any(states[it.place] < State.MADE for it in answers):
            self._hear()
            self._limit_silence()
        return all(states[it.place] >= State.MADE for it in answers)

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

    def allowed_ids(self, answer: Answer) -> list[int]:
        """Return the tokens that the last mask of an answer allows."""
        mask = self._memory.masks[answer.place].view(np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()

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
        self.seconds_waited = 0.0
        (answers, where), self._gathered = self._gathered, _NONE  # or none of them would be over
        if left:
            answers = [it for i, it in enumerate(answers) if i not in left]
            where = np.delete(where, [*left], axis=1)
        if not answers:
            return
        self._started, self._where = answers, where[0]
        # Before the tokens are sent, so that a mask of the last step is never used for this one.
        self._memory.states[self._where] = State.PENDING
        self._due = partial(_tokens_message, where, tokens)
        if ahead:
            self._send_due()

    @property
    def seconds_left(self) -> float:
        """Seconds that the present step may wait for the process if it has other rows; 0 while the
        process does not answer."""
        return 0.0 if self._is_stalled else max(0.0, self.longest_wait - self.seconds_waited)

    @property
    def is_running(self) -> bool:
        """Whether the process runs or waits for something to do: it is not stopped, nor gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("R", "S")

    def await_taken(self) -> set[Answer]:
        """Wait until the tokens that were `start`ed have been received, while `seconds_left`;
        return the answers that are over by then. The others may still be matched by threads:
        `await_end` and `gather` tell. An interrupt must not break in."""
        if not self._started:
            return set()
        if self._due is not None:
            self._send_due()
        counts = self._memory.counts
        self._wait(lambda: counts[0] >= self._num_sent, lambda: self.seconds_left == 0)
        answers, self._started = self._started, ()
        found = self._memory.states[self._where]
        over = [answers[i] for i in np.flatnonzero(found >= State.STOPPED).tolist()]
        for answer in over:
            self._note_end(answer)
        return set(over)

    def await_end(self, answer: Answer) -> bool:
        """Wait until an answer's last token is matched, while `seconds_left`; return whether the
        answer is over by it."""
        states = self._memory.states
        self._wait(lambda: states[answer.place] >= State.MADE, lambda: self.seconds_left == 0)
        if is_over := bool(states[answer.place] >= State.STOPPED):
            self._note_end(answer)
        return is_over

    def _note_end(self, answer: Answer) -> None:
        answer.error = self.error_of(answer)
        answer.is_stopped = answer.error is None

    def gather(
        self, items: Items, num_rows: int, may_leave: MayLeave = wait_for_all
    ) -> tuple[np.ndarray, Over, list[int]]:
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
        where = np.array([[it.place for it in answers], [row for _, row in items]], np.int32)
        self._gathered, (own, rows) = (answers, where), where
        found, late = self._memory.states[own], list[int]()

        def is_done() -> bool:
            nonlocal found, late
            found = self._memory.states[own]
            late = np.flatnonzero(found < State.MADE).tolist()
            return not late

        def give_up() -> bool:
            return may_leave(late, np.flatnonzero(found == State.HEAVY).tolist())

        self._wait(is_done, give_up)
        over = np.flatnonzero(found >= State.STOPPED).tolist()
        for i in over:
            self._note_end(answers[i])
        places = np.zeros(num_rows, np.int64)  # place 0 allows all
        places[rows] = own
        if len(self._buffer) != num_rows:
            self._buffer = np.empty((num_rows, self._memory.masks.shape[1]), np.int32)
        # All steps before are read, so that none needs what was there.
        np.take(self._memory.masks, places, axis=0, out=self._buffer, mode="clip")
        return self._buffer, [(i, answers[i].error) for i in over], late

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
        self._silence, self._looked, self._is_stalled = 0.0, time.monotonic(), False
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

    def _wait(self, is_done: Callable[[], bool], give_up: Callable[[], bool]) -> None:
        """Wait for the process, or until it has ended, and then nothing is pending."""
        if self._is_stalled:  # nothing may be waited for
            self._hear()
            self._limit_silence()
        looked = time.monotonic()
        while not is_done():
            if give_up():
                # A byte that was read during this wait may report an earlier step, so half of the
                # longest wait without a byte counts as silence.
                is_silent = self._silence >= self.longest_wait / 2
                if is_silent and self.seconds_waited >= self.longest_wait:
                    self._is_stalled = True
                return
            self._await_news(_LOOK if self.seconds_waited < _SHORT_WAIT else _RARE_LOOK)
            now = time.monotonic()
            self.seconds_waited += min(now - looked, _LONGEST_PAUSE)
            looked = now
            self._limit_silence()

    def _await_news(self, seconds: float | None) -> None:
        """Wait until something has changed in the memory, or so long."""
        if self._line is not None:
            select.select([self._line.sock], [], [], seconds)
        self._hear()

    def _hear(self) -> None:
        """Note whether the process has told anything, or has ended."""
        if self._line is None:
            return
        try:
            while self._line.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                self._silence, self._is_stalled = 0.0, False
        except BlockingIOError:
            return
        except OSError:
            pass
        code = self._line.exit_code(_EXIT_SECONDS)
        self._lose("its socket was closed" if code is None else describe_exit(code))

    def _limit_silence(self) -> None:
        """Something is pending: end a process that has said nothing for too long."""
        now = time.monotonic()
        self._silence += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        if self._line is not None and self._silence > self.longest_silence:
            self._lose(f"no progress for {self.longest_silence:g} s")

    def _lose(self, reason: str) -> None:
        self._end_line()
        self._line = None
        self._memory.lost_because = reason
        states = self._memory.states[: self._num_places]
        states[states != State.FREE] = State.LOST
        states[0] = State.FREE
        states[self._ending] = State.FREE
        self._memory.counts[0] = self._num_sent


class _Line(Child):
    """The process, and the thread that sends: it alone waits, for the device and for a process that
    is slow to read. The thread closes the channel.

    Attributes:
        put: Have a message made and sent.
    """

    def __init__(self, file: int):
        module = "jpaged.structured_outputs.mask_worker"
        super().__init__(module, file, files=[file], leads_group=True)  # Ctrl-C is the engine's
        queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self.put = queue.put
        try:
            if self.sock.fileno() >= MOST_FILES:
                raise OSError(f"{MOST_FILES} files are open, and `select` takes no more")
            threading.Thread(
                target=_send_all, args=(self.sock, queue), name="jpaged-masks", daemon=True
            ).start()
        except BaseException:  # an interrupt, too
            self.put(None)
            self.end()
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
    return frame(Kind.TOKENS, where.tobytes(), found, count=where.shape[1])
