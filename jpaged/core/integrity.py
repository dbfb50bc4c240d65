"""The scheduler's proof of its own books: slow, thorough, run after every step in tests."""

from collections.abc import Mapping
from itertools import chain, pairwise

from jpaged.core.errors import require
from jpaged.core.request import Request, RequestStatus, Sequence


def check_queues(
    max_num_seqs: int, running: Mapping[str, Request], waiting: Mapping[str, Request]
) -> None:
    """Raise IntegrityError unless the queues are in order and hold what their names say."""
    num_seqs = sum(len(request.sequences) for request in running.values())
    require(num_seqs <= max_num_seqs, f"{num_seqs} sequences run, max_num_seqs={max_num_seqs}")
    for earlier, later in pairwise(chain(running.values(), waiting.values())):
        require(
            earlier.arrival < later.arrival,
            f"{later.request_id!r} came before {earlier.request_id!r} and stands behind it",
        )
    for request in running.values():
        _check_running(request)
    for request in waiting.values():
        _check_waiting(request)


def _check_running(request: Request) -> None:
    name = f"running request {request.request_id!r}"
    require(request.status is RequestStatus.RUNNING, f"{name} is {request.status}")
    for sequence in request.sequences:
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        require(0 < computed < known, f"{name} has computed {computed} of {known} tokens")
        require(known <= request.max_num_tokens, f"{name} outgrows {request.max_num_tokens}")


def _check_waiting(request: Request) -> None:
    name = f"waiting request {request.request_id!r}"
    queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    require(request.status in queued, f"{name} is {request.status}")
    for sequence in request.sequences:
        holds = bool(sequence.block_table) or sequence.num_computed_tokens > 0
        require(not holds, f"{name} holds blocks")


def check_sequences(
    sequences: list[Sequence],
    draining: Mapping[int, Sequence],
    owners: Mapping[int, Request],
    num_in_flight_steps: int,
) -> None:
    """Raise IntegrityError unless `sequences`, unfinished and draining, are just those owned."""
    ids = {sequence.seq_id for sequence in sequences}
    require(len(ids) == len(sequences), "a sequence stands in two places")
    require(ids == owners.keys(), "a sequence is lost, or outlives its request")
    for sequence in sequences:
        name, pending = f"sequence {sequence.seq_id}", sequence.num_pending_tokens
        in_flight = sequence.num_in_flight_steps
        require(
            0 <= pending <= in_flight <= num_in_flight_steps,
            f"{name} has {pending} tokens pending and {in_flight} steps in flight",
        )
        is_draining = sequence.seq_id in draining
        require(is_draining == owners[sequence.seq_id].is_finished, f"{name} is misplaced")
        require(in_flight > 0 or not is_draining, f"{name} drains, and nothing is in flight")
