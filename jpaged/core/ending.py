"""How requests end: at their own end, at somebody's wish, or with an error."""

from jpaged.core.errors import NoTokenError
from jpaged.core.prefix_cache import CHAIN_ENDED
from jpaged.core.queue import RequestQueue
from jpaged.core.request import FinishReason, Request, RequestStatus, Sequence
from jpaged.core.roster import Roster
from jpaged.core.swap import SwapSpace


class Endings:
    """Takes requests and single sequences out of all the scheduler's books.

    Attributes:
        num_broken: Requests that failed for a fault in their handling, since the start.
    """

    def __init__(self, queues: tuple[RequestQueue, ...], roster: Roster, swap_space: SwapSpace):
        self._queues, self._roster, self._swap_space = queues, roster, swap_space
        self.num_broken = 0
        self._faults: list[tuple[Request, Exception]] = []

    def end(self, request: Request, reason: FinishReason) -> None:
        """The request is over, and so are those of its sequences that live."""
        for queue in self._queues:
            queue.discard(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.live:
            sequence.finish_reason = reason
            self._roster.let_go(sequence)
        request.live = []
        self._swap_space.drop(request)

    def end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """One of a request's samples is over, and the request with the last of them.

        Of one that has ended already, only the reason changes.
        """
        request, has_ended = sequence.request, sequence.finish_reason is not None
        sequence.finish_reason = reason
        if not request.is_finished and not has_ended:
            request.live.remove(sequence)
            self._roster.let_go(sequence)
            if not request.live:
                self.end(request, reason)
        elif request.is_finished and len(request.sequences) == 1:
            request.finish_reason = reason

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error from wherever it got to: perhaps with beams half forked or
        pruned, or in the middle of ending."""
        self._faults.append((request, error))
        self.num_broken += not isinstance(error, NoTokenError)
        request.live = self._roster.of(request)
        for sequence in request.live:
            sequence.num_chained_blocks = CHAIN_ENDED  # nobody else is to have what it computes
        self.end(request, FinishReason.ERROR)

    def take_faults(self) -> list[tuple[Request, Exception]]:
        """Requests that failed since the last call, and why."""
        faults, self._faults = self._faults, []
        return faults
