"""Runs requests for several callers at once: what one waits for, another may have advanced. So it
is with prefixes that are computed to be pinned."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate, pairwise

from jpaged.core.admission import check_pin_fits, fits_surely
from jpaged.core.plan import Goal
from jpaged.engine.inputs import Prompt
from jpaged.engine.interrupts import deferred_interrupts
from jpaged.engine.loop import EngineLoop
from jpaged.engine.preprocessing import PIN_PARAMS, Intake, Job
from jpaged.engine.request_state import RequestState
from jpaged.outputs import RequestDelta, RequestOutput, TextDelta


class Driver:
    """Between the callers of an engine and its loop.

    Args:
        loop: Advances all requests together.
        intake: Makes them.
    """

    def __init__(self, loop: EngineLoop, intake: Intake):
        self._loop = loop
        self._intake = intake

    @property
    def has_news(self) -> bool:
        """Whether requests that are polled were advanced since they were told of."""
        return bool(self._loop.undelivered)

    def take_news(self) -> list[RequestOutput]:
        """The outputs of those requests, each once. A Ctrl-C before all are made loses none."""
        news = self._loop.undelivered
        with deferred_interrupts():  # to ask for a text decodes it: not by halves
            outputs = [state.output() for state in news]
        self._loop.undelivered = {}
        return outputs

    def take_deltas(self) -> list[RequestDelta]:
        """What is new of those requests, each once."""
        news, self._loop.undelivered = self._loop.undelivered, {}
        return [self._take_delta(state) for state in news]

    def _take_delta(self, state: RequestState) -> RequestDelta:
        try:
            return state.take_delta()
        except Exception as error:  # of this request alone
            self.abort(state)
            last = TextDelta("", finish_reason="error", request_id=state.request_id)
            return RequestDelta(state.request_id, [last], finished=True, error=repr(error))

    def add(self, job: Job, request_id: str | None = None, *, polled: bool = False) -> RequestState:
        """Queue a request; TypeError or ValueError, with nothing queued, if it is not acceptable.

        Args:
            job: What to do.
            request_id: Unique among unfinished requests; None makes one.
            polled: Whether `take_news` shall tell of it.
        """
        state = self._make_state(job, request_id)
        state.polled = polled
        self._loop.add([state])
        return state

    def abort(self, state: RequestState) -> None:
        """End a request in any state; one that has ended is left as it is, its news too."""
        self._loop.abort(state)

    def abort_all(self) -> None:
        """Abort every request, wait for the device and forget all news."""
        for state in list(self._loop.requests.values()):
            self.abort(state)
        self._loop.drain()
        self._loop.undelivered.clear()

    def advance(self) -> None:
        """Advance by a step, or by a burst of them."""
        self._loop.advance(Goal.LATENCY)

    def complete(
        self, jobs: Sequence[Job], goal: Goal, progress: Callable[[int], object] = int
    ) -> list[RequestOutput]:
        """Run requests to their ends; an error or Ctrl-C leaves nothing of them behind.

        If one of them is refused, none is started. Each output is made when its request has ended,
        its texts too, which others' steps hide in the overlapped loop.

        Args:
            jobs: What to do.
            goal: What the steps are to favour meanwhile.
            progress: Told how many requests ended, after each turn of the loop.
        """
        states: list[RequestState] = []
        left: set[RequestState] = set()
        outputs: dict[RequestState, RequestOutput] = {}
        parts = self._parts(jobs)
        try:
            while parts or left:
                if parts:
                    new = list(map(self._make_state, parts.popleft()))
                    states += new
                    self._loop.add(new)
                    left.update(new)
                ended = left.intersection(self._loop.advance(goal))
                left -= ended
                progress(len(ended))
                _raise_faults(ended)
                outputs |= {state: state.output() for state in ended}
        finally:
            with deferred_interrupts():  # a second Ctrl-C too
                for state in states:
                    self.abort(state)
        return [outputs[state] for state in states]

    def _parts(self, jobs: Sequence[Job]) -> deque[Sequence[Job]]:
        """What to queue before the first step, and in each later turn: the device, which computes
        the step before, need not wait until requests are made that have no place in a step yet."""
        most = self._loop.scheduler.config.max_num_seqs
        bounds = [0, *range(self._num_to_begin(jobs), len(jobs), most), len(jobs)]
        return deque(jobs[a:b] for a, b in pairwise(bounds) if a < b)

    def _num_to_begin(self, jobs: Sequence[Job]) -> int:
        """How many fill the first step; all of them, if one may be refused or go before others, or
        if those that would fill it find a prefix, and do not."""
        config, manager = self._loop.scheduler.config, self._loop.scheduler.block_manager
        lengths = [len(job.prompt.token_ids or ()) for job in jobs]
        if not (all(job.is_plain for job in jobs) and fits_surely(config, manager, lengths)):
            return len(jobs)
        num_before = accumulate(lengths, initial=0)
        num_filling = sum(num < config.max_num_batched_tokens for num in num_before)
        num_first = min(num_filling, config.max_num_seqs, len(jobs))
        return len(jobs) if any(map(self._finds_prefix, jobs[:num_first])) else num_first

    def _finds_prefix(self, job: Job) -> bool:
        """Whether the prompt's first block is cached."""
        cache, tokens = self._loop.scheduler.block_manager.prefix_cache, job.prompt.token_ids or []
        if cache is None or len(tokens) <= cache.block_size:  # its last token is always computed
            return False
        return bool(cache.find_chain(tokens, 1, job.prompt.cache_salt))

    def pin(self, prefix: Prompt) -> int:
        """Hold a prompt of whole blocks for no request; what is not cached is computed first.

        Returns:
            The pin, for `jpaged.core.prefix_cache`.

        Raises:
            ValueError: prefix caching is off, or an unfinished request could not run to its end
                beside it.
            RuntimeError: a step failed, or the index holds another content under one of its hashes.
        """
        pin = self._pin_cached(prefix)
        while pin is None:
            self.complete([self._intake.make_job(prefix, PIN_PARAMS)], Goal.LATENCY)
            pin = self._pin_cached(prefix)
            # Where others run, they may have its blocks: it may have been preempted while its token
            # was on the way. To compute it again is to wait for them at most.
            if pin is None and not self._loop.scheduler.has_unfinished:
                message = "the prefix's hash is that of another: reset_prefix_cache() first"
                raise RuntimeError(message)
        return pin

    def deltas(self, state: RequestState) -> Generator[TextDelta, None, None]:
        """A request's answers as they grow, each to its last delta; closing it early aborts it."""
        growing = state.samples
        try:
            while growing:
                news = [sample for sample in growing if sample.has_news]
                if not news:  # others may have advanced it meanwhile
                    self.advance()
                for sample in news:
                    delta = sample.take_delta(state.request_id)
                    if delta.finished:
                        growing = [other for other in growing if other is not sample]
                    yield delta
            _raise_faults([state])
        finally:
            self.abort(state)

    def _pin_cached(self, prefix: Prompt) -> int | None:
        """Hold the blocks if all are cached; None, with nothing changed, if not."""
        self._loop.check_alive()
        scheduler = self._loop.scheduler
        manager, tokens = scheduler.block_manager, prefix.token_ids or []
        if manager.prefix_cache is None:
            raise ValueError("pin_prefix needs enable_prefix_caching=True")
        num_blocks = len(tokens) // manager.block_size
        found = manager.prefix_cache.find_chain(tokens, num_blocks, prefix.cache_salt)
        num_new = num_blocks - manager.pins.num_pinned(found)
        check_pin_fits(manager, num_new, scheduler.unfinished)
        return manager.pins.pin(found) if len(found) == num_blocks else None

    def _make_state(self, job: Job, request_id: str | None = None) -> RequestState:
        return self._intake.make_state(job, request_id=request_id, ids_in_use=self._loop.requests)


def _raise_faults(states: Iterable[RequestState]) -> None:
    for state in states:
        if state.error is not None:
            raise RuntimeError(f"request {state.request_id!r} failed") from state.error
