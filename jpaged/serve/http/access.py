"""Access control: API keys, allowed Host headers, and limits on requests in flight.

A client sends its key as `Authorization: Bearer KEY` or in `x-api-key`. A browser that opens the
dashboard uses HTTP Basic instead: any user name, with the key as the password. A browser adds
these credentials to every request to this server, even if a page of another site caused the
request. Cross-site requests with HTTP Basic are therefore refused.

The check of the Host header prevents DNS rebinding, which threatens a server without keys on the
loopback interface. In this attack, a malicious website points its domain name at 127.0.0.1 after
its page has loaded. The browser then lets the page reach this server, but still sends the
website's domain name as the Host.
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
"""Paths that need no API key."""

INVALID_KEY_CODE = "invalid_api_key"
"""OpenAI's error `code` for a missing or wrong API key (status 401)."""

_SAFE_METHODS = frozenset({"GET", "HEAD"})

ANY_HOST = "*"

_RETRY_AFTER_S = 1


class Access:
    """Checks the Host header and the API key of requests.

    "localhost" and loopback addresses are always allowed as the Host, with any port. A request
    without a Host header is allowed too, because it cannot come from a browser.

    Args:
        keys: Accepted API keys. If empty, requests need no key.
        hosts: Additional allowed host names, as `normalize_host` returns them. Every host is
            allowed if `hosts` is None or contains `ANY_HOST`.
        has_dashboard: Whether the server has the dashboard. HTTP Basic is accepted only then.
    """

    def __init__(self, keys: Sequence[str], hosts: Sequence[str] | None, *, has_dashboard: bool):
        self._key_digests = [_digest(key) for key in keys]
        self._allowed_hosts = None if hosts is None or ANY_HOST in hosts else frozenset(hosts)
        self._has_dashboard = has_dashboard

    def check(self, scope: Scope) -> None:
        """Check the Host header and the API key of a request.

        Raises:
            ApiError: 403 if the Host is not allowed; 401 if the request needs a key and has no
                valid one; 403 if a page of another site made the browser send the credentials.
        """
        self._check_host(Headers(scope=scope).get("host", ""))
        if self._key_digests and scope["path"] not in UNAUTHENTICATED_PATHS:
            self._check_key(scope)

    def _check_host(self, host_header: str) -> None:
        name, hosts = normalize_host(host_header), self._allowed_hosts
        is_served = hosts is None or name in hosts or name in ("", "localhost")
        if not (is_served or is_loopback(name)):
            message = f"the Host header {host_header[:100]!r} is not allowed"
            raise ApiError(403, f"{message}: start the server with --allowed-hosts {name[:100]}")

    def _check_key(self, scope: Scope) -> None:
        scheme, key = _credentials(scope)
        digest = _digest(key)
        # Compare with every key, because stopping at the first match would leak information through
        # timing.
        is_known = (
            sum(hmac.compare_digest(digest, known_digest) for known_digest in self._key_digests) > 0
        )
        if not is_known or (scheme == "basic" and not self._has_dashboard):
            raise self._unauthorized_error(scope["path"])
        if scheme == "basic" and not _is_first_party(scope):
            message = "HTTP Basic is accepted only from the dashboard page of this server"
            raise ApiError(403, f"{message}: send Authorization: Bearer KEY instead")

    def _unauthorized_error(self, path: str) -> ApiError:
        if self._has_dashboard and (path == "/" or path.startswith("/picture/")):
            message = "enter any user name, and a valid API key as the password"
            challenge = 'Basic realm="jpaged", charset="UTF-8"'
        else:
            message, challenge = "send a valid API key: Authorization: Bearer KEY", "Bearer"
        headers = {"WWW-Authenticate": challenge}
        return ApiError(401, message, code=INVALID_KEY_CODE, headers=headers)


def client_id(scope: Scope, *, has_keys: bool) -> str:
    """Identify the client of a request by a digest of its key or, without keys, by its address."""
    if has_keys:
        return _digest(_credentials(scope)[1]).hex()
    return str((scope.get("client") or ("unknown",))[0])


def _credentials(scope: Scope) -> tuple[str, str]:
    """Return the scheme of a request's credentials ("bearer", "basic" or "") and the API key."""
    headers = Headers(scope=scope)
    # Anthropic's clients send x-api-key instead of Authorization.
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
    """Return whether the request was sent by the user or by a page of this server.

    Browsers report the sender in the header Sec-Fetch-Site, except over plain HTTP to another
    machine. Without Sec-Fetch-Site, check the header Origin. Browsers send Origin with every
    request except GET and HEAD.
    """
    headers = Headers(scope=scope)
    site, has_safe_method = headers.get("sec-fetch-site"), scope["method"] in _SAFE_METHODS
    if site is not None:
        # Also accept requests that open a page. The user may enter the dashboard's address, or
        # follow a link from another site to the dashboard.
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
    """Return whether `name` is a loopback IP address. The result is False for every host name."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class InFlightLimiter:
    """Limits the sequences in flight in total, and the requests in flight per client.

    Attributes:
        num_requests: Number of admitted HTTP requests that have not ended.
    """

    def __init__(self, limits: Limits, max_num_seqs: int):
        self.num_requests = 0
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._num_sequences = 0
        self._num_requests_by_client: Counter[str] = Counter()

    @contextmanager
    def admit(self, client: str, num_sequences: int) -> Iterator[None]:
        """Count a request as in flight until the `with` block ends.

        Args:
            client: Identifier of the client, from `client_id`.
            num_sequences: Maximum number of sequences that the request runs at the same time.

        Raises:
            ApiError: 429 if the client has its maximum number of requests in flight; 400 if the
                batch and the queue together are too small for the request; 503 if the queue is
                full.
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
            message = f"this client already has {in_flight} in flight: wait until one ends"
            raise ApiError(
                429,
                message,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        max_sequences = self._max_num_seqs + self._limits.max_num_queued_reqs
        if num_sequences > max_sequences:
            message = (
                f"the request has {num_sequences} sequences, and this server accepts at most "
                f"{max_sequences} per request: send several smaller requests"
            )
            raise field_error("prompt", message, shows_path=False)
        num_queued = max(0, self._num_sequences + num_sequences - self._max_num_seqs)
        if num_queued > self._limits.max_num_queued_reqs:
            raise unavailable_error("the queue is full: try again later", _RETRY_AFTER_S)
