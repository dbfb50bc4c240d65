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

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        is_sorted = not self._requests or self.last.rank < request.rank
        self._requests[request.request_id] = request
        if not is_sorted:
            by_rank = sorted(self._requests.values(), key=lambda r: r.rank)
            self._requests = {r.request_id: r for r in by_rank}

    def remove(self, request: Request) -> None:
        """Take a request out; KeyError if it does not stand here."""
        del self._requests[request.request_id]

    def discard(self, request: Request) -> None:
        """Take a request out if it stands here."""
        self._requests.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Prove the order."""
        for earlier, later in pairwise(self):
            require(
                earlier.rank < later.rank,
                f"{later.request_id!r} comes before {earlier.request_id!r} and stands behind it",
            )
