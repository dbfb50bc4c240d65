"""Hands the picture's frames to all who watch: one fetch for all, and no viewer waits for another.

The engine is asked only while somebody watches, and a few times a second. A viewer who reads too
slowly is not served frame by frame any more: what was kept for it is dropped, and when it reads
again it gets a snapshot. So a viewer costs a bounded amount of memory, however slow it is.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from jpaged import EngineStats
from jpaged.serve.picture import Frame, PictureState

MAX_VIEWERS = 16
MAX_UNREAD = 1 << 18
"""Bytes kept for a viewer that does not read; with more to say, it gets a snapshot instead."""

INTERVAL = 0.1  # seconds between two fetches
HEARTBEAT = 15.0  # seconds of silence after which a viewer hears that the line still stands


class Shots(Protocol):
    """What a camera's `fetch` gives."""

    epoch: int
    frames: list[Frame]
    stats: EngineStats
    text: bool


class TooManyViewers(Exception):  # noqa: N818  (a refusal, and not an error of anybody's)
    """No more can watch at once."""


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
        fetch: Gives a camera's frames since the last time; see `Camera.fetch`.
        description: What does not change: `num_blocks` with the null block, `block_size`, ...
        interval: Seconds between two fetches.
    """

    def __init__(
        self,
        fetch: Callable[[int], Awaitable[Shots]],
        description: dict[str, Any],
        interval: float = INTERVAL,
    ):
        self._fetch = fetch
        self._description = description
        self._interval = interval
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._epoch = 0
        self._state = PictureState(description["num_blocks"])
        self._stats: EngineStats | None = None
        self._snapshot = b""  # of the state, if it was made since the last change

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    def watch(self) -> AsyncIterator[bytes]:
        """The events for one more viewer, until it leaves or nothing more can come.

        Raises:
            TooManyViewers: `MAX_VIEWERS` watch already.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} watch already: close another page")
        return self._events(Viewer())

    async def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._wake_all()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            while not self._closed:
                viewer.news.clear()
                if message := self._take_for(viewer):
                    yield message
                    continue
                try:
                    await asyncio.wait_for(viewer.news.wait(), HEARTBEAT)
                except TimeoutError:
                    yield b": still here\n\n"
                if self._task.done():
                    break  # the engine is gone
        finally:
            self._viewers.discard(viewer)

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
                "stats": _plain(self._stats),
            }
            self._snapshot = _event("snapshot", content)
        return self._snapshot

    async def _poll(self) -> None:
        try:
            while self._viewers and not self._closed:
                self._take(await self._fetch(self._epoch))
                await asyncio.sleep(self._interval)
        finally:
            self._stats = None  # whoever comes next waits for the first frame
            self._wake_all()

    def _take(self, shots: Shots) -> None:
        if shots.epoch != self._epoch:
            self._epoch = shots.epoch
            self._state = PictureState(self._description["num_blocks"])
            for viewer in self._viewers:
                viewer.needs_snapshot = True
        for frame in shots.frames:
            self._state.apply(frame)
        if shots.frames or shots.stats != self._stats:
            self._stats, self._snapshot = shots.stats, b""
            self._tell(shots)

    def _tell(self, shots: Shots) -> None:
        message = _event("frames", {"frames": shots.frames, "stats": _plain(shots.stats)})
        for viewer in self._viewers:
            viewer.offer(message)

    def _wake_all(self) -> None:
        for viewer in self._viewers:
            viewer.news.set()


def _plain(stats: EngineStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in EngineStats.__dataclass_fields__}


def _event(name: str, content: dict[str, Any]) -> bytes:
    data = json.dumps(content, separators=(",", ":"))  # ASCII, and no line breaks
    return f"event: {name}\ndata: {data}\n\n".encode()
