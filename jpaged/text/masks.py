"""The masks of steps: what each answer with a grammar may go on with, made in threads.

In the overlapped loop a step's masks are made while the host launches the step's layers and the
device computes them (`MaskMaker.start`, then `MaskMaker.gather`). llguidance takes some 15 us for
most masks, and 1 to 2 ms, a walk through the whole vocabulary, for some that allow many tokens:
where a string of bounded length has room for fewer letters than a token may have. Such a state
follows one that allows many tokens, too: these masks are made one by one, all others together.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jpaged.structured_outputs import bounds
from jpaged.text.grammar import GrammarError, Matcher

Items = Sequence[tuple[Matcher, int]]
"""Matchers, and the row of each."""

Failed = list[tuple[int, GrammarError]]
"""The places in `Items` of those that fail, and why."""

_LOOK = 5e-5
"""Seconds until those who wait for masks are asked again whether they would."""

_MOST_THREADS = 16
"""That make masks one by one."""

_MOST_AT_ONCE = 8
"""Of these, for one step: a few microseconds of each mask are Python's, and most are quick."""

_STRIDE = 64
"""Of a mask's words, each so-manieth tells whether it allows many tokens."""


_MOST_LEFT = 0.25
"""Of a step's rows: so many may sit it out because their masks are not there."""

_LONGEST_STEP = 0.05
"""Seconds that a step is taken to last at most, where the time between two was longer."""


class _Job:
    """A mask to be made, or made: row `row` of `rows`, int32 [rows, W]."""

    __slots__ = ("error", "is_made", "matcher", "row", "rows")

    def __init__(self, matcher: Matcher, row: int, rows: np.ndarray):
        self.matcher: Any = matcher  # until it is made: no cycle keeps an answer's lexer
        self.row, self.rows, self.is_made = row, rows, False
        self.error: GrammarError | None = None

    def finish(self, error: GrammarError | None = None, *, is_suspect: bool = False) -> None:
        """llguidance has filled the row, or this is what went wrong; a suspect may have taken too
        long, and is made by itself the next time."""
        if (matcher := self.matcher) is None:
            return
        words = self.rows[self.row]
        self.error = error or matcher.widen(words)
        some = words[::_STRIDE]
        matcher.is_wide = is_suspect or 2 * int(np.count_nonzero(some)) > len(some)
        self.matcher, self.is_made = None, True


class MaskMaker:
    """Makes the masks of one loop. Not thread-safe; the threads that it has are its own."""

    def __init__(self):
        self._executor: Any = None  # llguidance's threads
        self._singly: ThreadPoolExecutor | None = None  # make masks one by one
        self._leader: ThreadPoolExecutor | None = None  # makes those of `start`
        self._rows, self._num_started = np.zeros((0, 0), np.int32), 0  # of `start`, the last time
        self._taking: Future[None] | None = None
        self._changed = threading.Condition()

    def start(self, items: Items, num_rows: int, tokens: Callable[[], np.ndarray]) -> None:
        """Begin with the masks behind tokens that the engine has not read; before it reads them,
        it calls `await_taken`.

        Args:
            items: Answers that get a token, and the row of each among `tokens`.
            num_rows: Rows of the step that samples them, and probably of the next one.
            tokens: Waits for that step's tokens: int [num_rows].
        """
        if not items:
            return
        if self._leader is None:
            self._leader = ThreadPoolExecutor(1, thread_name_prefix="jpaged-masks")
        rows = self._rows = _all_ones(num_rows, items)
        jobs = [_Job(matcher, row, rows) for matcher, row in items]
        self._num_started = len(jobs)
        for job, (matcher, _) in zip(jobs, items, strict=True):
            matcher.mask_ahead = job
        self._taking = Future()
        _submit(self._leader, self._lead, jobs, tokens, self._taking)

    def await_taken(self) -> None:
        """Wait until the matchers have taken in the tokens that `start` waits for."""
        if self._taking is not None:
            self._taking.result()
            self._taking = None

    def gather(
        self, items: Items, num_rows: int, may_leave: Callable[[Sequence[int]], bool] | None
    ) -> tuple[np.ndarray, Failed, list[int]]:
        """The masks of a step, those that were started and others.

        Args:
            items: Its answers with grammars.
            num_rows: Its rows.
            may_leave: Whether to wait no longer for those at some places in `items`; asked now and
                then. None: all are waited for.

        Returns:
            int32 [num_rows, W], token `32 w + j` is bit `j` of word `w`, all ones in other rows;
            the places in `items` of those that fail, and why; and of those that were left. Rows of
            the last hold anything; they are gathered again with a later step, until which their
            matchers accept nothing.
        """
        masks, self._rows = self._rows, np.zeros((0, 0), np.int32)
        known: list[_Job | None] = [matcher.mask_ahead for matcher, _ in items]
        in_place = [
            job is not None and job.rows is masks and job.row == row
            for job, (_, row) in zip(known, items, strict=True)
        ]
        if len(masks) != num_rows or sum(in_place) != self._num_started:
            masks = _all_ones(num_rows, items)  # threads may write to the old ones yet
        jobs = [
            job or _Job(matcher, row, masks)
            for job, (matcher, row) in zip(known, items, strict=True)
        ]
        self._make([job for job, old in zip(jobs, known, strict=True) if old is None])
        late = self._await(jobs, may_leave)
        failed: Failed = []
        for i, (job, (matcher, row)) in enumerate(zip(jobs, items, strict=True)):
            matcher.mask_ahead = job if i in late else None
            if i in late:
                continue
            if job.error is not None:
                failed.append((i, job.error))
            if job.rows is not masks:
                masks[row] = job.rows[job.row]
        return masks, failed, late

    def _lead(
        self, jobs: list[_Job], tokens: Callable[[], np.ndarray], taken: Future[None]
    ) -> None:
        """What `start` starts."""
        try:
            found = tokens().tolist()
            # Below 0: no token could be sampled.
            self._take_in([(it.matcher, found[it.row]) for it in jobs if found[it.row] >= 0])
            taken.set_result(None)
            self._make(jobs)
        # A panic in Rust is no Exception. If it is the step that failed, the engine learns it, too.
        except BaseException as error:
            if not taken.done():
                taken.set_result(None)
            self._fail([job for job in jobs if not job.is_made], error)

    def _take_in(self, items: Items) -> None:
        """Let matchers accept tokens ahead."""
        matched = [(it, token) for it, token in items if it.is_matched(token)]
        for matcher, token in items if len(matched) < len(items) else ():
            if not matcher.is_matched(token):
                matcher.accept_ahead(token)
        if matched:
            inner = [(it.inner, token) for it, token in matched]
            allowed = self._threads_of_llguidance().consume_token_par(inner)
            for (matcher, token), is_allowed in zip(matched, allowed, strict=True):
                matcher.note_consumed(token, is_allowed)

    def _make(self, jobs: Sequence[_Job]) -> None:
        """Make masks: those that are likely to be quick at once, the others in threads."""
        slow = [job for job in jobs if job.matcher.is_wide]
        quick = [job for job in jobs if not job.matcher.is_wide] if slow else jobs
        if slow:
            if self._singly is None:
                self._singly = ThreadPoolExecutor(_num_threads(), thread_name_prefix="jpaged-mask")
            queue = deque(slow)
            for _ in range(min(len(slow), _MOST_AT_ONCE)):
                _submit(self._singly, self._make_singly, queue)
        start = time.perf_counter()
        self._fill_together(quick)
        # Some answer may take too long. Which one is seen the next time.
        is_suspect = time.perf_counter() - start > bounds.MASK_SECONDS
        for job in quick:
            job.finish(is_suspect=is_suspect)
        self._tell()

    def _fill_together(self, jobs: Sequence[_Job]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        bound = [(job.matcher.inner, job.row) for job in jobs if not job.matcher.is_free]
        if bound:
            fill_next_token_bitmask_par(self._threads_of_llguidance(), bound, jobs[0].rows)

    def _threads_of_llguidance(self) -> Any:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        return self._executor

    def _make_singly(self, queue: deque[_Job]) -> None:
        """Make masks one by one; some that take a processor too long fail."""
        from llguidance.numpy import fill_next_token_bitmask

        while queue:
            try:
                job = queue.popleft()
            except IndexError:  # another thread has it
                return
            start = time.thread_time()
            try:
                if not job.matcher.is_free:
                    fill_next_token_bitmask(job.matcher.inner, job.rows, job.row)
                is_slow = time.thread_time() - start > bounds.MASK_SECONDS
                job.finish(job.matcher.too_slow() if is_slow else None)
                self._tell()
            except BaseException as error:  # as in `_lead`
                self._fail([job], error)

    def _fail(self, jobs: Sequence[_Job], error: BaseException) -> None:
        """End what waits for masks that cannot be made."""
        for job in jobs:
            job.finish(GrammarError(f"structured_outputs: no mask could be made: {error}"))
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify()

    def _await(
        self, jobs: Sequence[_Job], may_leave: Callable[[Sequence[int]], bool] | None
    ) -> list[int]:
        """Wait for masks; the places of those that were left."""
        with self._changed:
            while late := [i for i, job in enumerate(jobs) if not job.is_made]:
                if may_leave is not None and may_leave(late):
                    return late
                self._changed.wait(None if may_leave is None else _LOOK)
        return []


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


def _all_ones(num_rows: int, items: Items) -> np.ndarray:
    return np.full((num_rows, items[0][0].mask_width), -1, np.int32)


def _submit(threads: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
    """Have some work done in a thread."""
    try:
        threads.submit(work, *args)
    except RuntimeError:  # the interpreter ends, but some thread goes on: pools take no more
        work(*args)


def _num_threads() -> int:
    return max(2, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
