"""Hands the picture's frames to all who watch: one fetch for all, and no viewer waits for another.

The engine is asked only while somebody watches, and a few times a second. A viewer who reads too
slowly is not served frame by frame any more: what was kept for it is dropped, and when it reads
again it gets a snapshot. So a viewer costs a bounded amount of memory, however slow it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import lru_cache
from typing import Any

import msgspec

from jpaged import EngineStats
from jpaged.serve.errors import failed, not_serving
from jpaged.serve.frames import Frames
from jpaged.serve.picture import PictureState, for_viewers

MAX_VIEWERS = 16
MAX_UNREAD = 1 << 18
"""Bytes kept for a viewer that does not read; with more to say, it gets a snapshot instead."""

INTERVAL = 0.1  # seconds between two fetches
HEARTBEAT = 15.0  # seconds of silence after which a viewer hears that the line still stands


class Viewer:
    """What one viewer has not read yet."""

    def __init__(self):
        self.needs_snapshot = True
        self.unread = bytearray()
        self.news = asyncio.Event()

    def offer(self, message: bytes) -> None:
        """Keep a message, or let go of all if they are too many."""
        if not self.needs_snapshot:
            self.unread += message
        if len(self.unread) > MAX_UNREAD:
            self.unread.clear()
            self.needs_snapshot = True
        self.news.set()


class PictureHub:
    """Serves the picture as server-sent events: one `snapshot`, then `frames`.

    Args:
        fetch: Gives a camera's frames since those of an epoch; see `Camera.fetch`.
        description: What does not change: `num_blocks` with the null block, `block_size`, ...
        word: The text of a token id; None where no text is shown.
        is_over: Whether all streams shall end.
        interval: Seconds between two fetches.
    """

    def __init__(
        self,
        fetch: Callable[[int], Awaitable[Frames]],
        description: dict[str, Any],
        word: Callable[[int], str] | None = None,
        is_over: Callable[[], bool] = bool,
        interval: float = INTERVAL,
    ):
        self._fetch = fetch
        self._description = description
        self._word = None if word is None else lru_cache(maxsize=1 << 18)(word)
        self._is_over = is_over
        self._interval = interval
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._epoch = 0
        self._state = PictureState(description["num_blocks"])
        self._stats: EngineStats | None = None
        self._snapshot = b""  # of the state, if it was made since the last change

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """The events for one more viewer, until it leaves or there is no engine any more.

        Raises:
            ApiError: too many watch already, or there is no engine.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise not_serving(f"{MAX_VIEWERS} watch already: close another page")
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
            self._task.add_done_callback(_note_end)
        try:
            while not self._task.done():
                viewer.news.clear()
                if message := self._take_for(viewer):
                    yield message
                    continue
                try:
                    await asyncio.wait_for(viewer.news.wait(), HEARTBEAT)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._viewers.discard(viewer)
        self._task.result()
        if viewer.needs_snapshot:
            raise not_serving("the server is shutting down")

    def _take_for(self, viewer: Viewer) -> bytes:
        if viewer.needs_snapshot and self._stats is not None:
            viewer.needs_snapshot = False
            viewer.unread.clear()
            return self._make_snapshot()
        message = bytes(viewer.unread)
        viewer.unread.clear()
        return message

    def _make_snapshot(self) -> bytes:
        if not self._snapshot and self._stats is not None:
            content = {
                "pool": self._description,
                "frame": self._state.snapshot(),
                "stats": self._stats,
            }
            self._snapshot = _event("snapshot", content)
        return self._snapshot

    async def _poll(self) -> None:
        try:
            while self._viewers and not self._is_over():
                self._take(await self._fetch(self._epoch))
                await asyncio.sleep(self._interval)
        except BaseException:
            self._epoch = 0  # frames may be lost: the camera is to begin anew
            raise
        finally:
            self._stats = None  # whoever comes next waits for the first frame
            for viewer in self._viewers:
                viewer.news.set()

    def _take(self, news: Frames) -> None:
        if news.failed:
            raise failed()
        if news.epoch != self._epoch:
            self._epoch = news.epoch
            self._state = PictureState(self._description["num_blocks"])
            self._stats, self._snapshot = None, b""
            for viewer in self._viewers:
                viewer.needs_snapshot = True
        frames = [for_viewers(frame, self._word) for frame in news.frames]
        for frame in frames:
            self._state.apply(frame)
        if frames or news.stats != self._stats:
            self._stats, self._snapshot = news.stats, b""
            message = _event("frames", {"frames": frames, "stats": news.stats})
            for viewer in self._viewers:
                viewer.offer(message)


def _note_end(task: asyncio.Task[None]) -> None:
    """Those who watch are told of an exception; if nobody does, nobody need know."""
    if not task.cancelled():
        task.exception()


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))
