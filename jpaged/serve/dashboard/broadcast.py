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
from jpaged.serve.engine.messages import PoolDiff, PoolDiffs
from jpaged.serve.errors import ApiError, internal_error, unavailable_error
from jpaged.serve.http.exchange import GeneratorResponse
from jpaged.serve.http.serving import Phase, ServerState

MAX_VIEWERS = 16
MAX_UNREAD_BYTES = 1 << 18
"""Bytes of frames kept for a viewer that does not read; with more, it gets a snapshot instead. One
fetch's frames are kept whatever their size: they may tell the text that the snapshot left to them,
and another snapshot would leave it to frames again."""

FETCH_INTERVAL_S = 0.1  # seconds between two fetches
HEARTBEAT_S = 15.0  # seconds of silence after which a viewer hears that the line still stands

_STATIC_FOLDER = files("jpaged.serve.dashboard").joinpath("static")
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE_HEADERS = {
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
    for file in _STATIC_FOLDER.iterdir()
    if PurePath(file.name).suffix in _MEDIA_TYPES
)
"""The page, and the files it is made of; an editor's backups are not among them."""


class ViewerState(Enum):
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
        self.state = ViewerState.BEHIND
        self.has_unread = asyncio.Event()
        self._snapshot = b""
        self._unread = bytearray()

    def start_from(self, snapshot: bytes) -> None:
        """Let it follow from here; what it has not read is dropped."""
        self.state, self._snapshot = ViewerState.FOLLOWING, snapshot
        self._unread.clear()
        self.has_unread.set()

    def add_unread(self, message: bytes) -> None:
        """Keep a fetch's frames for it, if it follows; drop all if it has too many unread."""
        if self._unread and len(self._unread) + len(message) > MAX_UNREAD_BYTES:
            self.state, self._snapshot = ViewerState.BEHIND, b""
            self._unread.clear()
        if self.state is ViewerState.FOLLOWING:
            self._unread += message
            self.has_unread.set()

    def take_unread(self) -> bytes:
        """What it reads next; nothing if it has read all."""
        if self.state is ViewerState.BEHIND:
            self.state = ViewerState.WAITING
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
        fetch: Callable[[bool], Awaitable[PoolDiffs]],
        description: dict[str, Any],
        token_text: Callable[[int], str] | None = None,
        is_over: Callable[[], bool] = bool,
        interval: float = FETCH_INTERVAL_S,
    ):
        self._fetch = fetch
        self._description = description
        self._token_text = None if token_text is None else lru_cache(maxsize=1 << 18)(token_text)
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

    async def stream_events(self) -> AsyncGenerator[bytes, None]:
        """The events for one more viewer, until it leaves or there is no engine any more.

        Raises:
            ApiError: too many watch already, or there is no engine.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable_error(f"{MAX_VIEWERS} watch already: close another page")
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
            self._task.add_done_callback(_retrieve_exception)
        task = self._task  # after a fault a later viewer begins another, which has lost frames
        try:
            while not task.done():
                viewer.has_unread.clear()
                if message := viewer.take_unread():
                    yield message
                    continue
                try:
                    await asyncio.wait_for(viewer.has_unread.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._viewers.discard(viewer)
        task.result()
        if viewer.state is not ViewerState.FOLLOWING:
            raise unavailable_error("the server is shutting down")

    async def _poll(self) -> None:
        try:
            while self._viewers and not self._is_over():
                is_snapshot_awaited = any(
                    viewer.state is ViewerState.WAITING for viewer in self._viewers
                )
                self._handle_diffs(await self._fetch(is_snapshot_awaited))
                await asyncio.sleep(self._interval)
        finally:
            for viewer in self._viewers:
                viewer.has_unread.set()

    def _handle_diffs(self, pool_diffs: PoolDiffs) -> None:
        if pool_diffs.failed:
            raise internal_error()
        diffs = [self._with_token_text(diff) for diff in pool_diffs.diffs]
        snapshot = (
            None if pool_diffs.snapshot is None else self._with_token_text(pool_diffs.snapshot)
        )
        if snapshot is not None and snapshot.text:  # frames tell no more of what a snapshot told
            diffs.append(PoolDiff(snapshot.step, PoolChanges(), snapshot.text))
        if diffs or pool_diffs.stats != self._stats:
            self._stats = pool_diffs.stats
            message = _encode_event("frames", {"frames": diffs, "stats": pool_diffs.stats})
            for viewer in self._viewers:
                viewer.add_unread(message)
        if snapshot is not None:
            content = {"pool": self._description, "frame": snapshot, "stats": pool_diffs.stats}
            message = _encode_event("snapshot", content)
            diffs_were_lost, self._epoch = pool_diffs.epoch != self._epoch, pool_diffs.epoch
            for viewer in self._viewers:
                if diffs_were_lost or viewer.state is ViewerState.WAITING:
                    viewer.start_from(message)

    def _with_token_text(self, diff: PoolDiff) -> PoolDiff:
        """The frame with the text of its tokens, where text is shown, and never with the tokens."""
        changes, text = diff.changes, {}
        if self._token_text is not None:
            text = {block: [*map(self._token_text, ids)] for block, ids in changes.tokens.items()}
        return PoolDiff(diff.step, replace(changes, tokens={}), text)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, which viewers raise; without viewers asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _encode_event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def dashboard_routes(serving: ServerState) -> list[Route]:
    """The page, its files and its events."""
    dashboard = Dashboard(serving)
    return [
        Route("/", dashboard.file, methods=["GET"]),
        Route("/picture/events", dashboard.events, methods=["GET"]),
        Route("/picture/{name}", dashboard.file, methods=["GET"]),
    ]


class Dashboard:
    """The dashboard's endpoints."""

    def __init__(self, serving: ServerState):
        self._serving = serving
        self._broadcast: Broadcast | None = None

    async def file(self, request: Request) -> Response:
        """`/` and `/picture/NAME`: the page, and what it is made of."""
        name = request.path_params.get("name")
        if name is not None and f"/picture/{name}" not in PAGE_PATHS:
            raise ApiError(404, "there is no such file")
        file = _STATIC_FOLDER.joinpath(name or "index.html")
        media_type = _MEDIA_TYPES[PurePath(file.name).suffix]
        return Response(file.read_bytes(), media_type=media_type, headers=_PAGE_HEADERS)

    async def events(self, request: Request) -> Response:
        """`/picture/events`: a snapshot of the memory, then what changes."""
        serving, config = self._serving, self._serving.config
        engine, shows_text = serving.engine, config.dashboard_text
        info = await engine.wait_ready()
        if self._broadcast is None:
            self._broadcast = Broadcast(
                lambda snapshot: engine.fetch_pool_diffs(snapshot, shows_text),
                {
                    "num_blocks": info.num_blocks,
                    "block_size": info.block_size,
                    "model": config.model_names[0],
                },
                serving.tokenizing.token_text if shows_text else None,
                is_over=lambda: serving.phase is Phase.DRAINING and not serving.num_requests,
            )
        stall_timeout = config.limits.stall_timeout
        return GeneratorResponse(
            self._broadcast.stream_events(), is_stream=True, stall_timeout=stall_timeout
        )
