"""The page at `/` and the event stream it draws.

The page itself tells nothing and needs no key, so that a browser can open it; the stream does. It
loads nothing from elsewhere, and its headers forbid a browser to do so, or to run scripts in it.
"""

from collections.abc import AsyncIterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jpaged.serve.picture_hub import PictureHub, TooManyViewers

EVENTS_PATH = "/picture/events"

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "picture.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("main", "pool", "grid", "charts", "detail", "play", "prompts", "stream")
    },
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

OPEN_PATHS = frozenset({"/", *(f"/picture/{name}" for name in _TYPES if name != "index.html")})
"""What a browser fetches before anybody could type a key: files, the same for all."""


def dashboard_routes(hub: PictureHub) -> list[Route]:
    """The page, its files and its events."""

    async def page(request: Request) -> Response:
        return _file("index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _TYPES or name == "index.html":
            return Response("there is no such file", 404, media_type="text/plain")
        return _file(name)

    async def events(request: Request) -> Response:
        try:
            stream: AsyncIterator[bytes] = hub.watch()
        except TooManyViewers as refusal:
            error = {"message": str(refusal), "type": "server_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 503, {"Retry-After": "30"})
        headers = {**_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    return [
        Route("/", page),
        Route(EVENTS_PATH, events),
        Route("/picture/{name}", file),
    ]


def _file(name: str) -> Response:
    content = files("jpaged.serve").joinpath("static", name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers=_HEADERS)
