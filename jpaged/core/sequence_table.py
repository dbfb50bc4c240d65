"""The scheduler's books: its queues of requests, the table of their sequences, and their proofs."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise, product

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import require
from jpaged.core.plan import RowFork
from jpaged.core.request import Request, RequestStatus, Sequence


class RequestQueue:
    """Requests by id, the lowest rank first.

    A request that belongs at the end, as nearly all do, costs O(1); another one costs a sort of a
    list that is sorted already. With `has_fast_front` (of those that wait) one that belongs at the
    front costs O(1), too, and so does the first one; but to go through all takes five times as
    long, as the scheduler does in each step with those that run.
    """

    def __init__(self, *, has_fast_front: bool = False):
        self._requests: dict[str, Request] = OrderedDict() if has_fast_front else {}
        self._groups: dict[str, Request] = {}  # those of several sequences

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def get(self, request_id: str) -> Request | None:
        """The request of that id, if it is in the queue."""
        return self._requests.get(request_id)

    @property
    def first(self) -> Request:
        """The request to serve first; StopIteration if there is none."""
        return next(iter(self._requests.values()))

    @property
    def last(self) -> Request:
        """The request to preempt first; StopIteration if there is none."""
        return next(reversed(self._requests.values()))

    @property
    def num_rows(self) -> int:
        """Sequences that all of its requests may have in a step."""
        return len(self._requests) + sum(r.num_rows - 1 for r in self._groups.values())

    def add(self, request: Request) -> None:
        """Insert a request by its rank; its number of seats must not rise while it is queued."""
        name, requests = request.request_id, self._requests
        is_last = not requests or self.last.sort_key < request.sort_key
        is_first = not is_last and request.sort_key < self.first.sort_key
        requests[name] = request
        if request.num_rows > 1:
            self._groups[name] = request
        if is_first and isinstance(requests, OrderedDict):
            requests.move_to_end(name, last=False)
        elif not is_last:
            by_rank = sorted(requests.values(), key=lambda r: r.sort_key)
            self._requests = type(requests)((r.request_id, r) for r in by_rank)

    def remove(self, request: Request) -> None:
        """Take a request out; IntegrityError if it is not in the queue."""
        name = request.request_id
        require(self._requests.pop(name, None) is not None, f"{name!r} is not in its queue")
        self._groups.pop(name, None)

    def discard(self, request: Request) -> None:
        """Take a request out if it is in the queue."""
        if request.request_id in self._requests:
            self.remove(request)

    def check_integrity(self) -> None:
        """Prove the order, and the number of seats."""
        num_rows = sum(request.num_rows for request in self)
        require(self.num_rows == num_rows, f"{num_rows} seats taken, {self.num_rows} counted")
        for earlier, later in pairwise(self):
            require(
                earlier.sort_key < later.sort_key,
                f"{later.request_id!r} comes before {earlier.request_id!r} and is queued after it",
            )


class SequenceTable:
    """All sequences from arrival until the last step that holds them is read, and the changes of
    their device rows that the next plan carries.

    Attributes:
        known: All sequences by id.
        draining: Those that have ended, but whose blocks steps in flight may still write.
    """

    def __init__(self, manager: BlockManager):
        self.by_id: dict[int, Sequence] = {}
        self.draining: dict[int, Sequence] = {}
        self._manager = manager
        self._released: list[int] = []
        self._row_forks: dict[int, RowFork] = {}  # by the child's id

    def add(self, sequence: Sequence) -> None:
        """Register a sequence."""
        self.by_id[sequence.seq_id] = sequence

    def find_by_request(self, request: Request) -> list[Sequence]:
        """All sequences of a request whose blocks have not all come back."""
        return [sequence for sequence in self.by_id.values() if sequence.request is request]

    def fork_rows(self, forks: Iterable[RowFork]) -> None:
        """Give the children of parents that have rows a row too, with the next plan."""
        for parent, child in forks:
            if parent.has_row:
                self._row_forks[child.seq_id] = parent, child
                child.has_row = True

    def release_row(self, sequence: Sequence) -> None:
        """Take a sequence's row away, if it has one.

        Children that no plan has forked from its row yet join like new sequences, with whole
        tables.
        """
        for parent, child in list(self._row_forks.values()):
            if parent is sequence:
                del self._row_forks[child.seq_id]
                child.has_row = False
        if self._row_forks.pop(sequence.seq_id, None) is None and sequence.has_row:
            self._released.append(sequence.seq_id)
        sequence.has_row = False

    def pop_row_changes(self) -> tuple[tuple[int, ...], tuple[RowFork, ...]]:
        """Rows released and forked since the last call."""
        if not (self._released or self._row_forks):
            return (), ()
        changes = tuple(self._released), tuple(self._row_forks.values())
        self._released.clear()
        self._row_forks.clear()
        return changes

    def retire(self, sequence: Sequence) -> None:
        """End a sequence's membership; its blocks come back when no step in flight writes them.

        A second call, for a sequence whose first call raised midway, completes it.
        """
        self.release_row(sequence)
        if sequence.host_block_table:
            sequence.host_block_table, sequence.num_computed_tokens = [], 0
        self.draining[sequence.seq_id] = sequence
        if not sequence.num_in_flight_steps:
            self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free a draining sequence's blocks and forget it; other sequences are left alone."""
        if self.draining.pop(sequence.seq_id, None) is not None:
            self._manager.free(sequence)
            sequence.num_computed_tokens = 0
            del self.by_id[sequence.seq_id]

    def check_integrity(
        self, unfinished_requests: Iterable[Request], num_in_flight_steps: int
    ) -> None:
        """Prove that the known sequences are just the live and the draining ones."""
        live_sequences = [
            sequence for request in unfinished_requests for sequence in request.live_sequences
        ]
        sequences = [*live_sequences, *self.draining.values()]
        ids = {sequence.seq_id for sequence in sequences}
        require(len(ids) == len(sequences), "a sequence is in two places")
        require(ids == self.by_id.keys(), "a sequence is lost, or outlives its request")
        require(
            all(s.finish_reason is None for s in live_sequences), "a sequence has ended and is live"
        )
        for sequence in sequences:
            name, pending = f"sequence {sequence.seq_id}", sequence.num_pending_tokens
            in_flight = sequence.num_in_flight_steps
            require(
                0 <= pending <= in_flight <= num_in_flight_steps,
                f"{name} has {pending} tokens pending and {in_flight} steps in flight",
            )
        for sequence in self.draining.values():
            name = f"sequence {sequence.seq_id}"
            require(sequence.num_in_flight_steps > 0, f"{name} drains, and nothing is in flight")


def check_queues(max_num_seqs: int, running: RequestQueue, waiting: RequestQueue) -> None:
    """Raise IntegrityError unless the queues are in order and hold what their names say."""
    running.check_integrity()
    num_seqs = running.num_rows
    require(num_seqs <= max_num_seqs, f"{num_seqs} sequences run, max_num_seqs={max_num_seqs}")
    waiting.check_integrity()
    for running_request, waiting_request in product(running, waiting):
        require(
            running_request.sort_key < waiting_request.sort_key
            or running_request.priority > waiting_request.priority,
            f"{waiting_request.request_id!r} came before {running_request.request_id!r} and waits for it",
        )
    for request in running:
        _check_running(request)
    for request in waiting:
        _check_waiting(request)


def _check_running(request: Request) -> None:
    name = f"running request {request.request_id!r}"
    require(request.status is RequestStatus.RUNNING, f"{name} is {request.status}")
    require(bool(request.live_sequences), f"{name} has no sequence")
    require(len(request.live_sequences) <= request.num_rows, f"{name} has too many sequences")
    for sequence in request.live_sequences:
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        has_more = computed < known or request.beam is not None
        require(computed <= known and has_more, f"{name} has computed {computed} of {known} tokens")
        require(known <= request.max_num_tokens, f"{name} outgrows {request.max_num_tokens}")
        require(not sequence.host_block_table, f"{name} is in an image")


def _check_waiting(request: Request) -> None:
    name = f"waiting request {request.request_id!r}"
    queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
    require(request.status in queued, f"{name} is {request.status}")
    is_out = request.status is RequestStatus.SWAPPED
    for sequence in request.live_sequences:
        require(not sequence.block_table, f"{name} holds blocks")
        require(not sequence.has_row, f"{name} has a row")
        require(is_out or not sequence.num_computed_tokens, f"{name} has computed tokens")
        require(is_out or not sequence.host_block_table, f"{name} is in an image")
