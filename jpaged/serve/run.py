"""Requests in flight, as whoever asked for them sees them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jpaged import RequestDelta, SamplingParams
from jpaged.serve.errors import ApiError, failed, not_serving

MAX_UNREAD = 8192
"""Deltas that may wait for a slow reader before its request is aborted."""


class News(NamedTuple):
    """What one of the jobs of a run grew by."""

    index: int
    delta: RequestDelta


Watch = Callable[[News], None]
"""Told of all news as they come, read or not."""


@dataclass(frozen=True)
class Job:
    """What to ask of the engine: a tokenised prompt, and what to do with it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Run:
    """The news of some jobs as they come: an asynchronous iterator of lists of `News`.

    Iterating raises `ApiError` if one of the jobs is refused or fails.

    Attributes:
        has_started: Whether anything came of it.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        abort: Callable[[list[str]], None],
        watch: Watch | None = None,
    ):
        self.has_started = False
        self._abort = abort
        self._watch = watch
        self._left = {job.request_id: i for i, job in enumerate(jobs)}
        self._unread: list[News] = []
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> "Run":
        return self

    async def __anext__(self) -> list[News]:
        while not (self._unread or self._error or self.is_over):
            self._changed.clear()
            await self._changed.wait()
        if self._unread:
            news, self._unread = self._unread, []
            return news
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._left or self._error is not None

    @property
    def left(self) -> list[str]:
        """Requests that are not over, as far as is known here."""
        return list(self._left)

    @property
    def why_ended(self) -> str:
        """Why those ended that did not come to their ends: "error", "abort" or "refused"."""
        status = None if self._error is None else self._error.status
        return {500: "error", 400: "refused"}.get(status or 0, "abort")

    def put(self, delta: RequestDelta) -> None:
        """Take news in; if they are too many for whoever should read them, it fails."""
        index = self._left.get(delta.request_id)
        if index is None or self._error is not None:
            return
        self.has_started = True
        if len(self._unread) >= MAX_UNREAD:
            self.fail(not_serving("aborted: the answer was not read as it came"))
            return
        news = News(index, delta)
        self._unread.append(news)
        if self._watch is not None:
            self._watch(news)
        if delta.finished:
            del self._left[delta.request_id]
            if delta.error is not None:
                self.fail(failed())
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error, after what came before."""
        if self._error is None:
            self._error = error
            self._abort(self.left)
        self._changed.set()

    def cut(self) -> None:
        """End it here, as if aborted."""
        for request_id in self.left:
            self.put(RequestDelta(request_id, [], finished=True))
