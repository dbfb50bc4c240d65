"""Who may ask: with API keys, only those who have one; constant in time.

Programs bring a key as `Authorization: Bearer KEY`. A browser cannot do so when it opens a page,
but asks its user for a name and a password (HTTP Basic); the password is a key. It then sends them
of its own accord, also where a page of another site makes it ask: such requests are refused.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serve.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""What is answered without a key."""

INVALID_KEY = "invalid_api_key"
"""OpenAI's code of a 401, by which clients know it."""

_HARMLESS = frozenset({"GET", "HEAD"})


class KeyGuard:
    """Lets requests pass that bring a key, or go where none is needed. All else is denied.

    Args:
        app: What is behind it.
        keys: One of these is needed; none: nothing is.
        has_page: Whether browsers have something to open at `/`, and so may use Basic.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, has_page: bool = False):
        self._app = app
        self._has_page = has_page
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, as ASGI has it.

        Raises:
            ApiError: 401 without a key, 403 with one that a browser was made to send.
        """
        if self._digests and scope["path"] not in OPEN_PATHS:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        kind, key = _credentials(scope)
        digest = _digest(key)
        # All of them are compared, so that the time tells nothing.
        is_known = sum(hmac.compare_digest(digest, own) for own in self._digests) > 0
        if not is_known or (kind == "basic" and not self._has_page):
            raise self._denial(scope["path"])
        if kind == "basic" and not _is_of_own_page(scope):
            message = "a user name and a password are for this server's own page only"
            raise ApiError(403, f"{message}: send Authorization: Bearer KEY instead")

    def _denial(self, path: str) -> ApiError:
        if self._has_page and (path == "/" or path.startswith("/picture/")):
            message = "give any user name, and a valid API key as the password"
            challenge = 'Basic realm="jpaged", charset="UTF-8"'
            return ApiError(401, message, code=INVALID_KEY, challenge=challenge)
        message = "give a valid API key: Authorization: Bearer KEY"
        return ApiError(401, message, code=INVALID_KEY, challenge="Bearer")


def client_of(scope: Scope, *, keyed: bool) -> str:
    """Whose request it is: where keys are needed a digest of the key, else the address."""
    if keyed:
        return _digest(_credentials(scope)[1]).hex()
    return str((scope.get("client") or ("unknown",))[0])


def _credentials(scope: Scope) -> tuple[str, str]:
    """The kind of credentials that a request brings, and its key; "" for none."""
    kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    kind, given = kind.lower(), given.strip()
    if kind == "bearer":
        return kind, given
    return (kind, _password(given)) if kind == "basic" else ("", "")


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _is_of_own_page(scope: Scope) -> bool:
    """Whether nobody but the user, or this server's page, can have had a browser ask this.

    Browsers say so in Sec-Fetch-Site; where they do not (plain HTTP from another machine), they
    send the Origin with all that may change something.
    """
    headers = Headers(scope=scope)
    site, is_harmless = headers.get("sec-fetch-site"), scope["method"] in _HARMLESS
    if site is not None:
        # Whoever follows a link to the page comes from elsewhere.
        is_opened = is_harmless and (site == "none" or headers.get("sec-fetch-mode") == "navigate")
        return site == "same-origin" or is_opened
    origin = headers.get("origin")
    if origin is None:
        return is_harmless
    return origin.lower().partition("://")[2] == headers.get("host", "").lower() != ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
