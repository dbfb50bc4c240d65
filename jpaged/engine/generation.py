"""Runs requests for several callers at once, and computes prefixes to be pinned.

Each call of the loop advances the requests of all callers: what one waits for, another may have
advanced.
"""

from collections.abc import Callable, Generator, Iterable, Sequence

from jpaged.core.plan import Goal
from jpaged.engine.loop import EngineLoop, deferred_interrupts
from jpaged.engine.preprocessing import PIN_PARAMS, CheckedRequest, Preprocessor, Prompt
from jpaged.engine.request_state import RequestState
from jpaged.observe.statistics import RequestMetrics
from jpaged.outputs import RequestDelta, RequestOutput, TextDelta


class Generation:
    """What the callers of an engine ask of its loop.

    Args:
        loop: Advances all requests together.
        preprocessor: Makes them.
    """

    def __init__(self, loop: EngineLoop, preprocessor: Preprocessor):
        self._loop = loop
        self._preprocessor = preprocessor

    @property
    def has_news(self) -> bool:
        """Whether requests that are polled were advanced since they were told of."""
        return bool(self._loop.undelivered)

    def take_news(self) -> list[RequestOutput]:
        """The outputs of those requests, each once. A Ctrl-C before all are made loses none."""
        news = self._loop.undelivered
        with deferred_interrupts():  # asking for a text decodes it, which must not be interrupted
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

    def add(
        self, asked: CheckedRequest, request_id: str | None = None, *, polled: bool = False
    ) -> RequestState:
        """Queue a request; TypeError or ValueError, with nothing queued, if it is not acceptable.

        Args:
            asked: What to do.
            request_id: Unique among unfinished requests; None makes one.
            polled: Whether `take_news` shall tell of it.
        """
        state = self._make_state(asked, request_id)
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
        self, asked: Sequence[CheckedRequest], goal: Goal, progress: Callable[[int], object] = int
    ) -> list[RequestOutput]:
        """Run requests to their ends; an error or Ctrl-C leaves nothing of them behind.

        If one of them is refused, none is started. Each output is made when its request has ended,
        its texts too, which others' steps hide in the overlapped loop.

        Args:
            asked: What to do.
            goal: What the steps are to favour meanwhile.
            progress: Told how many requests ended, after each turn of the loop.
        """
        states = list(map(self._make_state, asked))
        left, outputs = set(states), dict[RequestState, RequestOutput]()
        try:
            self._loop.add(states)
            while left:
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

    def pin(self, prefix: Prompt) -> int:
        """Hold a prompt of whole blocks for no request; what is not cached is computed first.

        Returns:
            The pin, for `jpaged.core.prefix_cache`.

        Raises:
            ValueError: prefix caching is off, or an unfinished request could not run to its end
                in the blocks that the pin leaves.
            RuntimeError: a step failed, or the index holds another content under one of its hashes.
        """
        pin = self._pin_cached(prefix)
        while pin is None:
            self.complete([self._preprocessor.check(prefix, PIN_PARAMS)], Goal.LATENCY)
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
        return self._loop.scheduler.pin_prefix(prefix.token_ids or [], prefix.cache_salt)

    def _make_state(self, asked: CheckedRequest, request_id: str | None = None) -> RequestState:
        preprocessor, in_use = self._preprocessor, self._loop.requests
        return RequestState(
            request=preprocessor.make_request(asked, request_id=request_id, ids_in_use=in_use),
            params=asked.params,
            prompt=asked.prompt,
            tokenizer=preprocessor.tokenizer,
            eos_token_ids=preprocessor.eos_token_ids,
            metrics=RequestMetrics(arrival_time=asked.arrival_time),
        )


def _raise_faults(states: Iterable[RequestState]) -> None:
    for state in states:
        if state.error is not None:
            raise RuntimeError(f"request {state.request_id!r} failed") from state.error
