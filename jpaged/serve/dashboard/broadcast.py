"""The page at `/`, and its events: one fetch of frames for all viewers.

The engine is asked only while there are viewers, and a few times a second. A viewer that reads too
slowly is not served frame by frame any more: what was kept for it is dropped, and when it reads
again it gets a snapshot. So a viewer costs a bounded amount of memory, however slow it is.

The page loads nothing from elsewhere, and its headers forbid a browser to do so, or to run scripts
in it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged import EngineStats
from jpaged.serve.api_errors import ApiError, failed, not_serving
from jpaged.serve.dashboard.codec import PoolState, for_viewers
from jpaged.serve.exchange import Exchange
from jpaged.serve.messages import PoolFrames
from jpaged.serve.serving import Phase, Serving

MAX_VIEWERS = 16
MAX_UNREAD = 1 << 18
"""Bytes kept for a viewer that does not read; with more to say, it gets a snapshot instead."""

INTERVAL = 0.1  # seconds between two fetches
HEARTBEAT = 15.0  # seconds of silence after which a viewer hears that the line still stands

_SCRIPTS = (
    *("main", "pool", "grid", "charts", "detail"),
    *("happened", "palette", "play", "prompts", "stream"),
)

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
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "picture.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
}

PAGE_PATHS = frozenset({"/", *(f"/picture/{name}" for name in _TYPES if name != "index.html")})
"""The page, and the files it is made of."""


class Viewer:
    """What one viewer has not read yet."""

    def __init__(self):
        self.needs_snapshot = True
        self.unread = bytearray()
        self.news = asyncio.Event()

    def offer(self, message: bytes) -> None:
        """Keep a message; drop all if they are too many."""
        if not self.needs_snapshot:
            self.unread += message
        if len(self.unread) > MAX_UNREAD:
            self.unread.clear()
            self.needs_snapshot = True
        self.news.set()


class Broadcast:
    """Serves the picture as server-sent events: one `snapshot`, then `frames`.

    Args:
        fetch: Gives a sampler's frames since those of an epoch; see `PoolSampler.fetch`.
        description: What does not change: `num_blocks` with the null block, `block_size`, ...
        word: Gives the text of a token id; None where no text is shown.
        is_over: Whether all streams shall end.
        interval: Seconds between two fetches.
    """

    def __init__(
        self,
        fetch: Callable[[int], Awaitable[PoolFrames]],
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
        self._state = PoolState(description["num_blocks"])
        self._stats: EngineStats | None = None
        self._snapshot = b""  # of the state, if it was made since the last change

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
            self._epoch = 0  # frames may be lost: the sampler is to begin anew
            raise
        finally:
            self._stats = None  # the next viewer waits for the first frame
            for viewer in self._viewers:
                viewer.news.set()

    def _take(self, news: PoolFrames) -> None:
        if news.failed:
            raise failed()
        if news.epoch != self._epoch:
            self._epoch = news.epoch
            self._state = PoolState(self._description["num_blocks"])
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
    """Retrieve the exception, which viewers raise; without viewers asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def dashboard_routes(serving: Serving) -> list[Route]:
    """The page, its files and its events."""
    dashboard = Dashboard(serving)
    return [
        Route("/", dashboard.page, methods=["GET"]),
        Route("/picture/events", dashboard.events, methods=["GET"]),
        Route("/picture/{name}", dashboard.file, methods=["GET"]),
    ]


class Dashboard:
    """The dashboard's endpoints."""

    def __init__(self, serving: Serving):
        self._serving = serving
        self._hub: Broadcast | None = None
        self._lock = asyncio.Lock()

    async def page(self, request: Request) -> Response:
        """`/`."""
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        """`/picture/NAME`: what the page is made of."""
        name = request.path_params["name"]
        if f"/picture/{name}" not in PAGE_PATHS:
            raise ApiError(404, "there is no such file")
        return _file(name)

    async def events(self, request: Request) -> Response:
        """`/picture/events`: a snapshot of the memory, then what changes."""
        hub = await self._open_hub()
        stall = self._serving.config.limits.stall_timeout
        return Exchange(hub.watch(), streams=True, stall_timeout=stall)

    async def _open_hub(self) -> Broadcast:
        async with self._lock:
            if self._hub is None:
                self._hub = await self._make_hub()
        return self._hub

    async def _make_hub(self) -> Broadcast:
        serving = self._serving
        engine, show_text = serving.engine, serving.config.dashboard_text
        info = await engine.ready()
        description = {
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "model": serving.config.model_names[0],
        }
        word = serving.tokenizing.token_text if show_text else None
        return Broadcast(
            lambda epoch: engine.pool_frames(epoch, show_text),
            description,
            word,
            is_over=lambda: serving.phase is Phase.DRAINING and not serving.num_requests,
        )


def _file(name: str) -> Response:
    content = files("jpaged.serve.dashboard").joinpath("static", name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers=_HEADERS)
