"""The scheduler's proof of its own books: slow, thorough, run after every step in tests."""

from collections.abc import Iterable, Mapping
from itertools import product

from jpaged.core.errors import require
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Request, RequestStatus, Sequence


def check_queues(max_num_seqs: int, running: RequestQueue, waiting: RequestQueue) -> None:
    """Raise IntegrityError unless the queues are in order and hold what their names say."""
    running.check_integrity()
    num_seqs = running.num_seats
    require(num_seqs <= max_num_seqs, f"{num_seqs} sequences run, max_num_seqs={max_num_seqs}")
    waiting.check_integrity()
    for runner, waiter in product(running, waiting):
        require(
            runner.rank < waiter.rank or runner.priority > waiter.priority,
            f"{waiter.request_id!r} came before {runner.request_id!r} and waits for it",
        )
    for request in running:
        _check_running(request)
    for request in waiting:
        _check_waiting(request)


def _check_running(request: Request) -> None:
    name = f"running request {request.request_id!r}"
    require(request.status is RequestStatus.RUNNING, f"{name} is {request.status}")
    require(bool(request.live), f"{name} has no sequence")
    require(len(request.live) <= request.num_seats, f"{name} has too many sequences")
    for sequence in request.live:
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        has_more = computed < known or request.beam is not None
        require(computed <= known and has_more, f"{name} has computed {computed} of {known} tokens")
        require(known <= request.max_num_tokens, f"{name} outgrows {request.max_num_tokens}")
        require(not sequence.image_table, f"{name} is in an image")


def _check_waiting(request: Request) -> None:
    name = f"waiting request {request.request_id!r}"
    queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
    require(request.status in queued, f"{name} is {request.status}")
    is_out = request.status is RequestStatus.SWAPPED
    for sequence in request.live:
        require(not sequence.block_table, f"{name} holds blocks")
        require(not sequence.is_placed, f"{name} has a row")
        require(is_out or not sequence.num_computed_tokens, f"{name} has computed tokens")
        require(is_out or not sequence.image_table, f"{name} is in an image")


def check_sequences(
    known: Mapping[int, Sequence],
    unfinished: Iterable[Request],
    draining: Mapping[int, Sequence],
    num_in_flight_steps: int,
) -> None:
    """Raise IntegrityError unless the `known` sequences are just the live and the draining."""
    live = [sequence for request in unfinished for sequence in request.live]
    places = [*live, *draining.values()]
    ids = {sequence.seq_id for sequence in places}
    require(len(ids) == len(places), "a sequence stands in two places")
    require(ids == known.keys(), "a sequence is lost, or outlives its request")
    require(all(s.finish_reason is None for s in live), "a sequence has ended and lives on")
    for sequence in places:
        name, pending = f"sequence {sequence.seq_id}", sequence.num_pending_tokens
        in_flight = sequence.num_in_flight_steps
        require(
            0 <= pending <= in_flight <= num_in_flight_steps,
            f"{name} has {pending} tokens pending and {in_flight} steps in flight",
        )
    for sequence in draining.values():
        name = f"sequence {sequence.seq_id}"
        require(sequence.num_in_flight_steps > 0, f"{name} drains, and nothing is in flight")
