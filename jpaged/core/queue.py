"""A line of requests, in the order of their rank."""

from collections.abc import Iterator
from itertools import pairwise

from jpaged.core.errors import require
from jpaged.core.request import Request


class RequestQueue:
    """Requests by id, the lowest rank first.

    Nearly all come at one of the two ends, where they cost O(1); one that belongs between others
    (it has a priority) costs a sort of what is sorted already.
    """

    def __init__(self):
        self._requests: dict[str, Request] = {}
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
        """The request of that id, if it stands here."""
        return self._requests.get(request_id)

    @property
    def first(self) -> Request:
        """The one to be served first; StopIteration if there is none."""
        return next(iter(self._requests.values()))

    @property
    def last(self) -> Request:
        """The one to give way first; StopIteration if there is none."""
        return next(reversed(self._requests.values()))

    @property
    def num_seats(self) -> int:
        """Sequences that all of them may have in a step."""
        return len(self._requests) + sum(r.num_seats - 1 for r in self._groups.values())

    def add(self, request: Request) -> None:
        """Put a request in its place; while it stands here it gets no more seats than it has."""
        is_sorted = not self._requests or self.last.rank < request.rank
        self._requests[request.request_id] = request
        if request.num_seats > 1:
            self._groups[request.request_id] = request
        if not is_sorted:
            by_rank = sorted(self._requests.values(), key=lambda r: r.rank)
            self._requests = {r.request_id: r for r in by_rank}

    def remove(self, request: Request) -> None:
        """Take a request out; KeyError if it does not stand here."""
        del self._requests[request.request_id]
        self._groups.pop(request.request_id, None)

    def discard(self, request: Request) -> None:
        """Take a request out if it stands here."""
        self._requests.pop(request.request_id, None)
        self._groups.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Prove the order, and the number of seats."""
        num_seats = sum(request.num_seats for request in self)
        require(self.num_seats == num_seats, f"{num_seats} seats taken, {self.num_seats} counted")
        for earlier, later in pairwise(self):
            require(
                earlier.rank < later.rank,
                f"{later.request_id!r} comes before {earlier.request_id!r} and stands behind it",
            )
