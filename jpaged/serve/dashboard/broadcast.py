"""The page at `/`, and its events: one fetch of frames for all viewers.

The engine is asked only while there are viewers, and a few times a second. A viewer that reads too
slowly is not served frame by frame any more: what was kept for it is dropped, and when it reads
again it gets a snapshot. So a viewer costs a bounded amount of memory, however slow it is.

The page loads nothing from elsewhere, and its headers forbid a browser to do so, or to run scripts
in it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged import EngineStats, PoolChanges
from jpaged.serve.engine.messages import PoolFrame, PoolFrames
from jpaged.serve.errors import ApiError, failed, not_serving
from jpaged.serve.http.exchange import Exchange
from jpaged.serve.http.serving import Phase, Serving

MAX_VIEWERS = 16
MAX_UNREAD = 1 << 18
"""Bytes of frames kept for a viewer that does not read; with more, it gets a snapshot instead. One
fetch's frames are kept whatever their size: they may tell the text that the snapshot left to them,
and another snapshot would leave it to frames again."""

INTERVAL = 0.1  # seconds between two fetches
HEARTBEAT = 15.0  # seconds of silence after which a viewer hears that the line still stands

_STATIC = files("jpaged.serve.dashboard").joinpath("static")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

PAGE_PATHS = frozenset(
    "/" if file.name == "index.html" else f"/picture/{file.name}"
    for file in _STATIC.iterdir()
    if PurePath(file.name).suffix in _TYPES
)
"""The page, and the files it is made of; an editor's backups are not among them."""


class Place(Enum):
    """Where a viewer is in the stream."""

    BEHIND = auto()  # it is new, or frames were dropped: it has nothing, and did not try to read
    WAITING = auto()  # it found nothing to read, and waits for a snapshot
    FOLLOWING = auto()  # it gets all frames since its snapshot


class Viewer:
    """What one viewer has not read yet.

    Attributes:
        place: Where it is.
        news: Set when there is something to read.
    """

    def __init__(self):
        self.place = Place.BEHIND
        self.news = asyncio.Event()
        self._snapshot = b""
        self._unread = bytearray()

    def begin(self, snapshot: bytes) -> None:
        """Let it follow from here; what it has not read is dropped."""
        self.place, self._snapshot = Place.FOLLOWING, snapshot
        self._unread.clear()
        self.news.set()

    def offer(self, message: bytes) -> None:
        """Keep a fetch's frames for it, if it follows; drop all if it has too many unread."""
        if self._unread and len(self._unread) + len(message) > MAX_UNREAD:
            self.place, self._snapshot = Place.BEHIND, b""
            self._unread.clear()
        if self.place is Place.FOLLOWING:
            self._unread += message
            self.news.set()

    def take(self) -> bytes:
        """What it reads next; nothing if it has read all."""
        if self.place is Place.BEHIND:
            self.place = Place.WAITING
        message, self._snapshot = self._snapshot, b""
        if not message:
            message = bytes(self._unread)
            self._unread.clear()
        return message


class Broadcast:
    """Serves the picture as server-sent events: one `snapshot`, then `frames`.

    Args:
        fetch: Gives a sampler's frames, and a snapshot if it is asked for one; see
            `PoolSampler.fetch`.
        description: What does not change: `num_blocks` with the null block, `block_size`, ...
        word: Gives the text of a token id; None where no text is shown.
        is_over: Whether all streams shall end.
        interval: Seconds between two fetches.
    """

    def __init__(
        self,
        fetch: Callable[[bool], Awaitable[PoolFrames]],
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
        self._stats: EngineStats | None = None  # as viewers know them

    @property
    def num_viewers(self) -> int:
        """Viewers at present."""
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
        task = self._task  # after a fault a later viewer begins another, which has lost frames
        try:
            while not task.done():
                viewer.news.clear()
                if message := viewer.take():
                    yield message
                    continue
                try:
                    await asyncio.wait_for(viewer.news.wait(), HEARTBEAT)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._viewers.discard(viewer)
        task.result()
        if viewer.place is not Place.FOLLOWING:
            raise not_serving("the server is shutting down")

    async def _poll(self) -> None:
        try:
            while self._viewers and not self._is_over():
                is_awaited = any(viewer.place is Place.WAITING for viewer in self._viewers)
                self._take(await self._fetch(is_awaited))
                await asyncio.sleep(self._interval)
        finally:
            for viewer in self._viewers:
                viewer.news.set()

    def _take(self, news: PoolFrames) -> None:
        if news.failed:
            raise failed()
        frames = [self._for_viewers(frame) for frame in news.frames]
        snapshot = None if news.snapshot is None else self._for_viewers(news.snapshot)
        if snapshot is not None and snapshot.text:  # frames tell no more of what a snapshot told
            frames.append(PoolFrame(snapshot.step, PoolChanges(), snapshot.text))
        if frames or news.stats != self._stats:
            self._stats = news.stats
            message = _event("frames", {"frames": frames, "stats": news.stats})
            for viewer in self._viewers:
                viewer.offer(message)
        if snapshot is not None:
            content = {"pool": self._description, "frame": snapshot, "stats": news.stats}
            message = _event("snapshot", content)
            frames_were_lost, self._epoch = news.epoch != self._epoch, news.epoch
            for viewer in self._viewers:
                if frames_were_lost or viewer.place is Place.WAITING:
                    viewer.begin(message)

    def _for_viewers(self, frame: PoolFrame) -> PoolFrame:
        """The frame with the text of its tokens, where text is shown, and never with the tokens."""
        changes, text = frame.changes, {}
        if self._word is not None:
            text = {block: [*map(self._word, ids)] for block, ids in changes.tokens.items()}
        return PoolFrame(frame.step, replace(changes, tokens={}), text)


def _note_end(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, which viewers raise; without viewers asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def dashboard_routes(serving: Serving) -> list[Route]:
    """The page, its files and its events."""
    dashboard = Dashboard(serving)
    return [
        Route("/", dashboard.file, methods=["GET"]),
        Route("/picture/events", dashboard.events, methods=["GET"]),
        Route("/picture/{name}", dashboard.file, methods=["GET"]),
    ]


class Dashboard:
    """The dashboard's endpoints."""

    def __init__(self, serving: Serving):
        self._serving = serving
        self._broadcast: Broadcast | None = None

    async def file(self, request: Request) -> Response:
        """`/` and `/picture/NAME`: the page, and what it is made of."""
        name = request.path_params.get("name")
        if name is not None and f"/picture/{name}" not in PAGE_PATHS:
            raise ApiError(404, "there is no such file")
        file = _STATIC.joinpath(name or "index.html")
        media_type = _TYPES[PurePath(file.name).suffix]
        return Response(file.read_bytes(), media_type=media_type, headers=_HEADERS)

    async def events(self, request: Request) -> Response:
        """`/picture/events`: a snapshot of the memory, then what changes."""
        serving, config = self._serving, self._serving.config
        engine, shows_text = serving.engine, config.dashboard_text
        info = await engine.ready()
        if self._broadcast is None:
            self._broadcast = Broadcast(
                lambda snapshot: engine.pool_frames(snapshot, shows_text),
                {
                    "num_blocks": info.num_blocks,
                    "block_size": info.block_size,
                    "model": config.model_names[0],
                },
                serving.tokenizing.token_text if shows_text else None,
                is_over=lambda: serving.phase is Phase.DRAINING and not serving.num_requests,
            )
        stall_timeout = config.limits.stall_timeout
        return Exchange(self._broadcast.watch(), streams=True, stall_timeout=stall_timeout)
