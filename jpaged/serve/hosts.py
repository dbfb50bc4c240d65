"""Which Hosts are served, where nothing else tells this machine's users from strangers' pages.

A browser lets a page ask the server it came from, known by its name. Who owns the name can let it
lead to 127.0.0.1 once the page is there (DNS rebinding): the page then reads whatever a server on
the user's own machine answers. It cannot change the Host that the browser sends.
"""

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serve.errors import ApiError

ANY_HOST = "*"

_WITH_PORT = re.compile(r"(?:\[([^][]+)\]|([^][:]*))(?::[0-9]*)?")


class HostGuard:
    """Lets requests pass whose Host is this machine's own, with any port, or one of those allowed.

    One that names no Host passes too: browsers always do.

    Args:
        app: What is behind it.
        allowed: Names, as of `host_name`; `ANY_HOST` stands for all.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]):
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, as ASGI has it.

        Raises:
            ApiError: 403 for another Host.
        """
        given = Headers(scope=scope).get("host", "")
        name = host_name(given)
        if not self._serves(name):
            message = f"the Host {given[:100]!r} is not served here"
            raise ApiError(403, f"{message}: start the server with --allowed-hosts {name[:100]}")
        await self._app(scope, receive, send)

    def _serves(self, name: str) -> bool:
        own = name in ("", "localhost") or is_loopback(name)
        return own or name in self._allowed or ANY_HOST in self._allowed


def host_name(host: str) -> str:
    """A Host without its port, as it is compared: 'Example.com:80' is 'example.com'."""
    host = host.strip().lower()
    found = _WITH_PORT.fullmatch(host)
    return (found[1] or found[2] if found else host).removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether the name is an address of this machine that others cannot reach."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
