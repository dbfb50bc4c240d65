"""Run a server process, and find a browser, for tests of the dashboard."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import ServerProcess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def serving(cache: Path, *flags: str) -> Iterator[str]:
    """Start a server with these flags and yield its URL. Then check that SIGTERM ends the
    server."""
    server = ServerProcess(cache, "--no-log-requests", *flags)
    try:
        yield server.url
        server.process.terminate()
        assert server.wait() == 0, server.log
    finally:
        server.end()


def find_browser() -> str:
    """Return the path of a Chromium, or skip the test if none is installed.

    With `JPAGED_REQUIRE_BROWSER` set, as in continuous integration, a missing browser is a failure.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is not None:
        return found
    reason = "no Chromium found: install one (on Debian: apt-get install chromium)"
    if os.environ.get("JPAGED_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}; or unset JPAGED_REQUIRE_BROWSER to skip tests of the dashboard")
    pytest.skip(reason)
