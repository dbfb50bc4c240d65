"""The dashboard's HTTP endpoints: the page at `/`, its files, and its stream of pool diffs.

While the dashboard has viewers, a task fetches pool diffs from the engine a few times per second.
All viewers get the same diffs. If a viewer reads too slowly, its unread diffs are dropped, and it
gets a snapshot when it reads again. This limits the memory that a slow viewer takes.

The page loads files only from this server. The Content-Security-Policy forbids the browser to load
other files and to run inline scripts.
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
"""Maximum size of the unread pool diffs of a viewer; a slower viewer gets a snapshot instead.

The diffs of a single fetch are kept whatever their size. They may contain token text that was too
long for a snapshot, and the next snapshot would leave out this text again.
"""

FETCH_INTERVAL_S = 0.1
"""Seconds between two fetches of pool diffs."""

HEARTBEAT_S = 15.0
"""Seconds without an event after which a viewer gets a comment that keeps its connection alive."""

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
"""Paths of the dashboard's page and its files."""


class ViewerState(Enum):
    """State of a dashboard viewer: without a snapshot, waiting for a snapshot, or up to date.

    A viewer first gets a snapshot of the KV block pool, then a stream of changes: the pool diffs.
    """

    # The viewer is new, or its diffs were dropped and it has not tried to read again.
    BEHIND = auto()
    WAITING = auto()  # the viewer waits to read, and needs a snapshot first
    FOLLOWING = auto()  # the viewer has a snapshot, and gets all later diffs


class Viewer:
    """Unread events of one viewer of the dashboard.

    Attributes:
        state: Whether the viewer needs a snapshot of the pool or gets pool diffs.
        has_unread: Set when the viewer has unread events.
    """

    def __init__(self):
        self.state = ViewerState.BEHIND
        self.has_unread = asyncio.Event()
        self._snapshot = b""
        self._unread = bytearray()

    def start_from(self, snapshot: bytes) -> None:
        """Replace all unread events by a snapshot, and set the state to FOLLOWING."""
        self.state, self._snapshot = ViewerState.FOLLOWING, snapshot
        self._unread.clear()
        self.has_unread.set()

    def add_unread(self, message: bytes) -> None:
        """Append pool diffs for a viewer whose state is FOLLOWING.

        If the viewer would then have more than `MAX_UNREAD_BYTES` unread bytes, drop all diffs and
        set the state to BEHIND.
        """
        if self._unread and len(self._unread) + len(message) > MAX_UNREAD_BYTES:
            self.state, self._snapshot = ViewerState.BEHIND, b""
            self._unread.clear()
        if self.state is ViewerState.FOLLOWING:
            self._unread += message
            self.has_unread.set()

    def take_unread(self) -> bytes:
        """Return and remove the next unread events; empty if the viewer has read all events."""
        if self.state is ViewerState.BEHIND:
            self.state = ViewerState.WAITING
        message, self._snapshot = self._snapshot, b""
        if not message:
            message = bytes(self._unread)
            self._unread.clear()
        return message


class Broadcast:
    """Sends pool diffs to all viewers as server-sent events: one `snapshot`, then `frames`.

    Args:
        fetch: Fetches pool diffs, and a snapshot if its argument is True; see `PoolSampler.fetch`.
        description: Constant properties of the pool, such as `block_size` and `num_blocks`, which
            includes the null block.
        token_text: Returns the text of a token id; None if the dashboard shows no text.
        is_over: Returns whether all streams must end.
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
        self._stats: EngineStats | None = None  # the statistics sent last

    @property
    def num_viewers(self) -> int:
        """Number of current viewers."""
        return len(self._viewers)

    async def stream_events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events for a new viewer, until the viewer leaves or the streams end.

        Raises:
            ApiError: 503 if `MAX_VIEWERS` are connected, or the engine has ended.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable_error(f"{MAX_VIEWERS} dashboards are open already: close another one")
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
            self._task.add_done_callback(_retrieve_exception)
        # Keep the task in a local variable, because a later viewer replaces `self._task` if the
        # task fails.
        task = self._task
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
        # A snapshot may contain token text that no diff contains. Viewers that do not get the
        # snapshot get this text as an additional diff.
        if snapshot is not None and snapshot.text:
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
        """Return the pool diff without token ids, and with the tokens' text if text is shown."""
        changes, text = diff.changes, {}
        if self._token_text is not None:
            text = {block: [*map(self._token_text, ids)] for block, ids in changes.tokens.items()}
        return PoolDiff(diff.step, replace(changes, tokens={}), text)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the task's exception, because asyncio logs exceptions that are never retrieved."""
    if not task.cancelled():
        task.exception()


def _encode_event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def dashboard_routes(serving: ServerState) -> list[Route]:
    """Return the routes of the dashboard: its page, its files and its events."""
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
        """Serve the page at `/` or a file of the page at `/picture/NAME`."""
        name = request.path_params.get("name")
        if name is not None and f"/picture/{name}" not in PAGE_PATHS:
            raise ApiError(404, "this file does not exist: open the dashboard at /")
        file = _STATIC_FOLDER.joinpath(name or "index.html")
        media_type = _MEDIA_TYPES[PurePath(file.name).suffix]
        return Response(file.read_bytes(), media_type=media_type, headers=_PAGE_HEADERS)

    async def events(self, request: Request) -> Response:
        """Stream a snapshot of the pool, and then its changes, at `/picture/events`."""
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
