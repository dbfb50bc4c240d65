"""How much of requests' bodies the server holds at a time."""

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serve.errors import not_serving

_HOLD = "jpaged.hold"


class BodyBudget:
    """Bounds the bytes of bodies that are held at a time, from their arrival until the answers.

    Args:
        app: What is behind it; it says with `hold` what it keeps.
        most: Bytes of all requests together.
    """

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count until the request is over."""
        own = 0

        def hold(num_bytes: int) -> None:
            nonlocal own
            if self._held + num_bytes > self._most:
                raise not_serving("too much is being asked at the moment: try again later")
            self._held += num_bytes
            own += num_bytes

        try:
            await self._app({**scope, _HOLD: hold}, receive, send)
        finally:
            self._held -= own


def hold(scope: Scope, num_bytes: int) -> None:
    """Keep so many more bytes until the request of `scope` is over.

    Raises:
        ApiError: 503: others keep too many.
    """
    scope[_HOLD](num_bytes)
