"""Who may come in: the queue is bounded, and so is each client's share."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jpaged.serve.errors import ApiError, bad_field, not_serving
from jpaged.serve.options import Limits

_RETRY_AFTER = 1  # seconds


class Admission:
    """Counts what is in flight.

    Attributes:
        num_requests: HTTP requests that were admitted and are not over.
        is_open: Whether anybody is admitted at all.
    """

    def __init__(self, limits: Limits, max_num_seqs: int):
        self.num_requests = 0
        self.is_open = True
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._num_sequences = 0
        self._of_client: Counter[str] = Counter()

    @contextmanager
    def admit(self, client: str, num_sequences: int) -> Iterator[None]:
        """Take in a request that may run so many sequences, for as long as the block lasts.

        Raises:
            ApiError: 503 if the server drains or its queue is full, 429 if the client has its
                share, 400 if it asks for more than the queue holds.
        """
        self._check(client, num_sequences)
        self.num_requests += 1
        self._num_sequences += num_sequences
        self._of_client[client] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._num_sequences -= num_sequences
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]

    def _check(self, client: str, num_sequences: int) -> None:
        if not self.is_open:
            raise not_serving("the server is shutting down")
        share = self._limits.max_num_client_reqs
        if share is not None and self._of_client[client] >= share:
            message = f"this client has {share} requests in flight already: wait for one to end"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=_RETRY_AFTER)
        most = self._max_num_seqs + self._limits.max_num_queued_reqs
        if num_sequences > most:
            message = f"{num_sequences} sequences are asked for at once: {most} at most, here"
            raise bad_field("prompt", message)
        queued = max(0, self._num_sequences + num_sequences - self._max_num_seqs)
        if queued > self._limits.max_num_queued_reqs:
            raise not_serving("the queue is full: try again later", _RETRY_AFTER)
