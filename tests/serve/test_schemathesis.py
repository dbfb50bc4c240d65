"""Test thousands of valid and invalid requests that schemathesis generates from the schema."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.full

CONFIG = """
[checks]
# A valid body may ask for what no single field tells, such as more tokens than the model takes.
positive_data_acceptance.enabled = false
# An array that is too long may make the body too large.
negative_data_rejection.expected-statuses = ["400", "404", "405", "413", "415"]
"""
COMMAND = (
    *(sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run"),
    *("--phases", "coverage,fuzzing", "--seed", "1", "--max-examples", "5", "--no-shrink"),
    *("--generation-database", "none", "--suppress-health-check", "all"),
    *("--request-timeout", "60", "--continue-on-failure", "--no-color", "--warnings", "off"),
)


@pytest.fixture
def server(compilation_cache: Path) -> Iterator[ServerProcess]:
    """Run a server whose answers are short."""
    found = ServerProcess(compilation_cache, "--max-model-len", "48", "--no-log-requests")
    yield found
    found.end()


@pytest.mark.timeout(600)
def test_answers_match_the_published_schema(server: ServerProcess, tmp_path: Path):
    """Check that each response has a published status and schema, and is not a server error.

    Also check that invalid bodies are refused, and that methods without a route get 405.
    """
    (tmp_path / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
    run = subprocess.run(
        [*COMMAND, f"{server.url}/openapi.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]
    assert "16 selected / 16 total" in run.stdout
    assert server.process.poll() is None, server.log
