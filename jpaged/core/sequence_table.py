"""Queues of requests, a table of the sequences of these requests, and integrity checks."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise, product

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import require
from jpaged.core.plan import RowFork
from jpaged.core.request import Request, RequestStatus, Sequence


class RequestQueue:
    """Requests by id, sorted by `Request.sort_key`.

    Adding a request at the end takes O(1). Adding a request at another position sorts the whole
    queue again.

    Args:
        has_fast_front: Whether adding and reading the first request also take O(1), at the price of
            slower iteration. The scheduler sets this for the waiting queue, but not for the running
            queue, over which it iterates in each step.
    """

    def __init__(self, *, has_fast_front: bool = False):
        self._requests: dict[str, Request] = OrderedDict() if has_fast_front else {}
        self._groups: dict[str, Request] = {}  # requests with several rows

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id, or None if it is not in the queue."""
        return self._requests.get(request_id)

    @property
    def first(self) -> Request:
        """The request that is served first. Raises StopIteration if the queue is empty."""
        return next(iter(self._requests.values()))

    @property
    def last(self) -> Request:
        """The request that is preempted first. Raises StopIteration if the queue is empty."""
        return next(reversed(self._requests.values()))

    @property
    def num_rows(self) -> int:
        """Maximum number of sequences that all requests together have in one step."""
        return len(self._requests) + sum(r.num_rows - 1 for r in self._groups.values())

    def add(self, request: Request) -> None:
        """Insert a request in sort order.

        `request.num_rows` is the maximum number of sequences of the request in a step. This number
        must not grow while the request is queued. Otherwise, the sum over all queued requests
        (`RequestQueue.num_rows`) could be too small.
        """
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
        """Remove a request.

        Raises:
            IntegrityError: The request is not in the queue.
        """
        name = request.request_id
        require(self._requests.pop(name, None) is not None, f"{name!r} is not in its queue")
        self._groups.pop(name, None)

    def discard(self, request: Request) -> None:
        """Remove a request if it is in the queue."""
        if request.request_id in self._requests:
            self.remove(request)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the queue is sorted and its `num_rows` is correct."""
        num_rows = sum(request.num_rows for request in self)
        require(
            self.num_rows == num_rows, f"the queue has {num_rows} rows, but counts {self.num_rows}"
        )
        for earlier, later in pairwise(self):
            require(
                earlier.sort_key < later.sort_key,
                f"{later.request_id!r} comes before {earlier.request_id!r} and is queued after it",
            )


class SequenceTable:
    """Table of sequences, and the device-row changes that the next `StepPlan` must contain.

    A device row is the state of one running sequence on the device, such as its block table.

    Attributes:
        by_id: All sequences by id.
        draining: Ended sequences by id. Their blocks are not freed yet, because steps in flight may
            still write to the blocks.
    """

    def __init__(self, manager: BlockManager):
        self.by_id: dict[int, Sequence] = {}
        self.draining: dict[int, Sequence] = {}
        self._manager = manager
        self._released: list[int] = []
        self._row_forks: dict[int, RowFork] = {}  # forks by the child's seq_id

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self.by_id[sequence.seq_id] = sequence

    def find_by_request(self, request: Request) -> list[Sequence]:
        """Return the sequences of a request, including ended ones that are not freed yet."""
        return [sequence for sequence in self.by_id.values() if sequence.request is request]

    def fork_rows(self, forks: Iterable[RowFork]) -> None:
        """Schedule a copy of each parent's device row to a new device row for the child.

        A device row is the row of a sequence in the arrays on the device. The next `StepPlan`
        contains the copies. A parent without a device row is skipped.
        """
        for parent, child in forks:
            if parent.has_row:
                self._row_forks[child.seq_id] = parent, child
                child.has_row = True

    def release_row(self, sequence: Sequence) -> None:
        """Schedule the release of a sequence's device row for the next `StepPlan`.

        A device row is the row of a sequence in the arrays on the device. A sequence without a
        device row is ignored.

        `fork_rows` may have scheduled copies of this row to the rows of child sequences for the
        same plan. The release cancels these copies. The child sequences then join the batch like
        new sequences, with their whole block tables.
        """
        for parent, child in list(self._row_forks.values()):
            if parent is sequence:
                del self._row_forks[child.seq_id]
                child.has_row = False
        if self._row_forks.pop(sequence.seq_id, None) is None and sequence.has_row:
            self._released.append(sequence.seq_id)
        sequence.has_row = False

    def pop_row_changes(self) -> tuple[tuple[int, ...], tuple[RowFork, ...]]:
        """Return the `released_seq_ids` and `row_forks` since the last call, and clear them."""
        if not (self._released or self._row_forks):
            return (), ()
        changes = tuple(self._released), tuple(self._row_forks.values())
        self._released.clear()
        self._row_forks.clear()
        return changes

    def retire(self, sequence: Sequence) -> None:
        """Release the device row of an ended sequence, and free the sequence's blocks after the
        last step in flight.

        If the call raises an error, another call for the same sequence completes the work.
        """
        self.release_row(sequence)
        if sequence.host_block_table:
            sequence.host_block_table, sequence.num_computed_tokens = [], 0
        self.draining[sequence.seq_id] = sequence
        if not sequence.num_in_flight_steps:
            self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence in `draining`, and remove the sequence from the
        table.

        Sequences that are not in `draining` are ignored.
        """
        if self.draining.pop(sequence.seq_id, None) is not None:
            self._manager.free(sequence)
            sequence.num_computed_tokens = 0
            del self.by_id[sequence.seq_id]

    def check_integrity(
        self, unfinished_requests: Iterable[Request], num_in_flight_steps: int
    ) -> None:
        """Check that the table has exactly the live sequences and the sequences in `draining`.

        Args:
            unfinished_requests: Running and waiting requests.
            num_in_flight_steps: Number of planned steps whose sampled tokens the host has not read
                yet.

        Raises:
            IntegrityError: A sequence is missing or superfluous, or its numbers of tokens are
                inconsistent.
        """
        live_sequences = [
            sequence for request in unfinished_requests for sequence in request.live_sequences
        ]
        sequences = [*live_sequences, *self.draining.values()]
        ids = {sequence.seq_id for sequence in sequences}
        require(len(ids) == len(sequences), "a sequence is listed twice")
        require(
            ids == self.by_id.keys(),
            "a sequence is missing in the table, or remains after its request",
        )
        require(
            all(s.finish_reason is None for s in live_sequences), "an ended sequence is still live"
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
            require(
                sequence.num_in_flight_steps > 0, f"{name} is draining without a step in flight"
            )


def check_queues(
    max_num_seqs: int, running: RequestQueue, waiting: RequestQueue, *, speculates: bool = False
) -> None:
    """Check both queues, their order and the state of their requests.

    Args:
        max_num_seqs: Maximum number of running sequences.
        running: Requests in the batch.
        waiting: Requests that are not in the batch.
        speculates: Whether speculative decoding is on. A step then returns several tokens if drafts
            are accepted, so a request may reach its `max_num_tokens` while another step is in
            flight. That step returns no token, but still counts as one pending token. Therefore
            only tokens that the host has read are compared with `max_num_tokens`.

    Raises:
        IntegrityError: A queue or a request is inconsistent.
    """
    running.check_integrity()
    num_seqs = running.num_rows
    require(num_seqs <= max_num_seqs, f"{num_seqs} sequences run, max_num_seqs={max_num_seqs}")
    waiting.check_integrity()
    for running_request, waiting_request in product(running, waiting):
        require(
            running_request.sort_key < waiting_request.sort_key
            or running_request.priority > waiting_request.priority,
            f"{waiting_request.request_id!r} came before {running_request.request_id!r} "
            "and waits for it",
        )
    for request in running:
        _check_running(request, speculates)
    for request in waiting:
        _check_waiting(request)


def _check_running(request: Request, speculates: bool) -> None:
    name = f"running request {request.request_id!r}"
    require(request.status is RequestStatus.RUNNING, f"{name} is {request.status}")
    require(bool(request.live_sequences), f"{name} has no sequence")
    require(len(request.live_sequences) <= request.num_rows, f"{name} has too many sequences")
    for sequence in request.live_sequences:
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        has_more = computed < known or request.beam is not None
        require(computed <= known and has_more, f"{name} has computed {computed} of {known} tokens")
        require(
            (len(sequence.token_ids) if speculates else known) <= request.max_num_tokens,
            f"{name} has more than {request.max_num_tokens} tokens",
        )
        require(not sequence.host_block_table, f"{name} is still in a swap entry")


def _check_waiting(request: Request) -> None:
    name = f"waiting request {request.request_id!r}"
    queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
    require(request.status in queued, f"{name} is {request.status}")
    is_swapped = request.status is RequestStatus.SWAPPED
    for sequence in request.live_sequences:
        require(not sequence.block_table, f"{name} holds blocks")
        require(not sequence.has_row, f"{name} has a row")
        require(is_swapped or not sequence.num_computed_tokens, f"{name} has computed tokens")
        require(is_swapped or not sequence.host_block_table, f"{name} is still in a swap entry")
