"""Who may ask: with API keys, only those who have one; constant in time."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serve.errors import ApiError
from jpaged.serve.exchange import error_answer

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""What is answered without a key."""


class KeyGuard:
    """Lets requests pass that bring a key, or go where none is needed. All else is denied."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS):
        self._app = app
        self._open_paths = open_paths
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or deny, as ASGI has it."""
        if scope["type"] != "http" or self._may_pass(scope):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "give a valid API key: Authorization: Bearer KEY")
            await error_answer(error)(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in self._open_paths:
            return True
        digest = _digest(key_of(scope))
        # All of them are compared, so that the time tells nothing.
        return sum(hmac.compare_digest(digest, own) for own in self._digests) > 0


def key_of(scope: Scope) -> str:
    """The key that a request brings; "" for none."""
    kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def client_of(scope: Scope, *, keyed: bool) -> str:
    """Whose request it is: where keys are needed a digest of the key, else the address."""
    if keyed:
        return _digest(key_of(scope)).hex()
    return str((scope.get("client") or ("unknown",))[0])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
