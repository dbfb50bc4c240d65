"""A real server for the length of a block, and a real browser to look at it."""

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
    """The address of a server with these flags, which drains and ends well after the block."""
    server = ServerProcess(cache, "--no-log-requests", *flags)
    try:
        yield server.url
        server.process.terminate()
        assert server.wait() == 0, server.log
    finally:
        server.end()


def find_browser() -> str:
    """The path of a Chromium. Where there is none the test is skipped, but never where
    `JPAGED_REQUIRE_BROWSER` is set, as in continuous integration: there it fails."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is not None:
        return found
    reason = "no Chromium found: install one (on Debian: apt-get install chromium)"
    if os.environ.get("JPAGED_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}; JPAGED_REQUIRE_BROWSER says that the picture must be tested")
    pytest.skip(reason)
