"""The page at `/` and the event stream it draws.

The page loads nothing from elsewhere, and its headers forbid a browser to do so, or to run scripts
in it.
"""

import asyncio
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.serve.errors import ApiError
from jpaged.serve.exchange import Exchange
from jpaged.serve.picture_hub import PictureHub
from jpaged.serve.serving import Phase, Serving

_SCRIPTS = (
    *("main", "pool", "grid", "charts", "detail"),
    *("happened", "palette", "play", "prompts", "stream"),
)
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "picture.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
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

PAGE_PATHS = frozenset({"/", *(f"/picture/{name}" for name in _TYPES if name != "index.html")})
"""The page, and the files it is made of."""


def dashboard_routes(serving: Serving) -> list[Route]:
    """The page, its files and its events."""
    dashboard = Dashboard(serving)
    return [
        Route("/", dashboard.page, methods=["GET"]),
        Route("/picture/events", dashboard.events, methods=["GET"]),
        Route("/picture/{name}", dashboard.file, methods=["GET"]),
    ]


class Dashboard:
    """What is behind the routes."""

    def __init__(self, serving: Serving):
        self._serving = serving
        self._hub: PictureHub | None = None
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

    async def _open_hub(self) -> PictureHub:
        async with self._lock:
            if self._hub is None:
                self._hub = await self._make_hub()
        return self._hub

    async def _make_hub(self) -> PictureHub:
        serving = self._serving
        engine, show_text = serving.engine, serving.config.dashboard_text
        info = await engine.ready()
        description = {
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "model": serving.config.model_names[0],
        }
        word = serving.texts.token_text if show_text else None
        return PictureHub(
            lambda epoch: engine.frames(epoch, show_text),
            description,
            word,
            is_over=lambda: serving.phase is Phase.DRAINING and not serving.num_requests,
        )


def _file(name: str) -> Response:
    content = files("jpaged.serve").joinpath("static", name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers=_HEADERS)
