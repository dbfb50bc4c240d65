"""Which requests are served: API keys, the Host they name, and how many are in flight.

Programs bring a key as `Authorization: Bearer KEY`. A browser cannot do so when it opens a page,
but asks its user for a name and a password (HTTP Basic); the password is a key. It then sends them
of its own accord, also where a page of another site makes it ask: such requests are refused.

On the loopback without keys only the Host tells this machine's users from strangers' pages. A
browser lets a page ask the server it came from, known by its name, and the owner of the name can
let it lead to 127.0.0.1 once the page is loaded (DNS rebinding); the Host that the browser sends
is still that name.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope

from jpaged import errors
from jpaged.serve.errors import ApiError, field_error, unavailable_error
from jpaged.serve.options import Limits, normalize_host

UNAUTHENTICATED_PATHS = frozenset({"/health", "/ready", "/ping"})
"""What is answered without a key."""

INVALID_KEY_CODE = "invalid_api_key"
"""OpenAI's code of a 401, by which clients know it."""

_SAFE_METHODS = frozenset({"GET", "HEAD"})

ANY_HOST = "*"

_RETRY_AFTER_S = 1  # seconds


class Access:
    """Lets requests pass by the Host that they name and the key that they bring.

    Hosts are this machine's own, with any port, and those allowed. A request that names none
    passes too: browsers always do.

    Args:
        keys: One of these is needed; none: nothing is.
        hosts: Names in addition to this machine's own, as of `normalize_host`; `ANY_HOST` stands for
            all, and so does None.
        has_page: Whether browsers have something to open at `/`, and so may use Basic.
    """

    def __init__(self, keys: Sequence[str], hosts: Sequence[str] | None, *, has_dashboard: bool):
        self._key_digests = [_digest(key) for key in keys]
        self._allowed_hosts = None if hosts is None or ANY_HOST in hosts else frozenset(hosts)
        self._has_dashboard = has_dashboard

    def check(self, scope: Scope) -> None:
        """Let a request pass, or not.

        Raises:
            ApiError: 403 for another Host, 401 without a key where one is needed, 403 with one that
                a browser was made to send.
        """
        self._check_host(Headers(scope=scope).get("host", ""))
        if self._key_digests and scope["path"] not in UNAUTHENTICATED_PATHS:
            self._check_key(scope)

    def _check_host(self, host_header: str) -> None:
        name, hosts = normalize_host(host_header), self._allowed_hosts
        is_served = hosts is None or name in hosts or name in ("", "localhost")
        if not (is_served or is_loopback(name)):
            message = f"the Host {host_header[:100]!r} is not served here"
            raise ApiError(403, f"{message}: start the server with --allowed-hosts {name[:100]}")

    def _check_key(self, scope: Scope) -> None:
        scheme, key = _credentials(scope)
        digest = _digest(key)
        # All of them are compared, so that the time tells nothing.
        is_known = (
            sum(hmac.compare_digest(digest, known_digest) for known_digest in self._key_digests) > 0
        )
        if not is_known or (scheme == "basic" and not self._has_dashboard):
            raise self._unauthorized_error(scope["path"])
        if scheme == "basic" and not _is_first_party(scope):
            message = "a user name and a password are for this server's own page only"
            raise ApiError(403, f"{message}: send Authorization: Bearer KEY instead")

    def _unauthorized_error(self, path: str) -> ApiError:
        if self._has_dashboard and (path == "/" or path.startswith("/picture/")):
            message = "give any user name, and a valid API key as the password"
            challenge = 'Basic realm="jpaged", charset="UTF-8"'
        else:
            message, challenge = "give a valid API key: Authorization: Bearer KEY", "Bearer"
        headers = {"WWW-Authenticate": challenge}
        return ApiError(401, message, code=INVALID_KEY_CODE, headers=headers)


def client_id(scope: Scope, *, has_keys: bool) -> str:
    """Names a request's client: a digest of its key where keys are needed, else its address."""
    if has_keys:
        return _digest(_credentials(scope)[1]).hex()
    return str((scope.get("client") or ("unknown",))[0])


def _credentials(scope: Scope) -> tuple[str, str]:
    """The kind of credentials that a request brings, and its key; "" for none. Anthropic's clients
    have a header of their own."""
    headers = Headers(scope=scope)
    if "authorization" not in headers and "x-api-key" in headers:
        return "bearer", headers["x-api-key"].strip()
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    scheme, credentials = scheme.lower(), credentials.strip()
    if scheme == "bearer":
        return scheme, credentials
    return (scheme, _password(credentials)) if scheme == "basic" else ("", "")


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _is_first_party(scope: Scope) -> bool:
    """Whether the user or this server's own page made the browser send this request.

    Browsers say so in Sec-Fetch-Site; where they do not (plain HTTP from another machine), they
    send the Origin with all that may change something.
    """
    headers = Headers(scope=scope)
    site, has_safe_method = headers.get("sec-fetch-site"), scope["method"] in _SAFE_METHODS
    if site is not None:
        # A link to the page may be on any site.
        is_navigation = has_safe_method and (
            site == "none" or headers.get("sec-fetch-mode") == "navigate"
        )
        return site == "same-origin" or is_navigation
    origin = headers.get("origin")
    if origin is None:
        return has_safe_method
    return origin.lower().partition("://")[2] == headers.get("host", "").lower() != ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(name: str) -> bool:
    """Whether the name is an address of this machine that others cannot reach."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class InFlightLimiter:
    """Admits requests, and counts those in flight: the queue is bounded, and each client's share.

    Attributes:
        num_requests: HTTP requests that were admitted and are not over.
    """

    def __init__(self, limits: Limits, max_num_seqs: int):
        self.num_requests = 0
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._num_sequences = 0
        self._num_requests_by_client: Counter[str] = Counter()

    @contextmanager
    def admit(self, client: str, num_sequences: int) -> Iterator[None]:
        """Take in a request that may run so many sequences, for as long as the block lasts.

        Raises:
            ApiError: 503 if the queue is full, 429 if the client has its share, 400 if it asks for
                more than the queue holds.
        """
        self._check(client, num_sequences)
        self.num_requests += 1
        self._num_sequences += num_sequences
        self._num_requests_by_client[client] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._num_sequences -= num_sequences
            self._num_requests_by_client[client] -= 1
            if not self._num_requests_by_client[client]:
                del self._num_requests_by_client[client]

    def _check(self, client: str, num_sequences: int) -> None:
        client_limit = self._limits.max_num_client_reqs
        if client_limit is not None and self._num_requests_by_client[client] >= client_limit:
            in_flight = errors.format_count(client_limit, "request")
            message = f"this client has {in_flight} in flight already: wait for one to end"
            raise ApiError(
                429,
                message,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        max_sequences = self._max_num_seqs + self._limits.max_num_queued_reqs
        if num_sequences > max_sequences:
            message = (
                f"{num_sequences} sequences are asked for at once: {max_sequences} at most, here"
            )
            raise field_error("prompt", message, shows_path=False)
        num_queued = max(0, self._num_sequences + num_sequences - self._max_num_seqs)
        if num_queued > self._limits.max_num_queued_reqs:
            raise unavailable_error("the queue is full: try again later", _RETRY_AFTER_S)
