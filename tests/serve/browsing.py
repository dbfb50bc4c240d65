"""A real server in a process of its own, and a real browser to look at it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = ("--max-num-seqs", "16", "--max-model-len", "512", "--num-blocks", "129")


@contextmanager
def serving(cache: Path, *flags: str) -> Iterator[str]:
    """`python -m jpaged.serve` with these flags; gives its address."""
    command = [sys.executable, "-m", "jpaged.serve", "--port", "0", "--no-log-requests"]
    process = subprocess.Popen(
        [*command, "--compilation-cache-dir", str(cache), *SMALL, *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said


def _address(process: subprocess.Popen) -> str:
    said = []
    for line in process.stderr or ():
        said.append(line)
        if found := re.search(r"serving .* at (http\S+)", line):
            return found[1]
    raise RuntimeError(f"the server did not start:\n{''.join(said)}")


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
