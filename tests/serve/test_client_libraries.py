"""Run the examples of docs/clients.md and the programs in `clients/` with unmodified libraries.

Each program runs in a separate process, so the libraries' unclosed resources and warnings do not
fail the tests. The model was not trained to call tools, so the server enforces tool calls and
schemas with grammars.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_helpers import ANSWER, QUESTION
from server_process import ServerProcess

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = Path(__file__).parent / "clients"
ADDRESS = "http://127.0.0.1:8000"
NAMES = ("Qwen/Qwen3-8B", "jpaged-tiny")
FLAGS = (
    *("--served-model-name", *NAMES, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--chat-template", str(PROGRAMS / "hermes.jinja")),
    *("--max-model-len", "1024", "--num-blocks", "520"),
)
# Keep litellm from downloading its table of model prices.
ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def python_examples(page: str) -> dict[str, str]:
    """Return the Python code of a docs page by heading."""
    found = re.findall(
        r"^(#+) ([^\n]+)|^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S
    )
    made, heading = {}, ""
    for is_heading, text, code in found:
        heading = text if is_heading else heading
        if code:
            made[heading] = made.get(heading, "") + code
    return made


EXAMPLES = python_examples("clients.md")


def program_path(library: str) -> Path:
    return PROGRAMS / f"with_{library.replace('-', '_')}.py"


@pytest.fixture(scope="module")
def server(compilation_cache: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(compilation_cache, *FLAGS)
    yield server
    server.end()


@pytest.fixture
def url(server: ServerProcess) -> Iterator[str]:
    """Yield the server's URL. Then check that the server answers and that no block is in use."""
    yield server.url
    body = {"model": "jpaged-tiny", "prompt": QUESTION, "max_tokens": 64, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == ANSWER
    for _ in range(100):  # the engine frees blocks after it sends the last delta
        metrics = httpx.get(f"{server.url}/metrics").text
        (used,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics, re.M)
        if float(used) == 0:
            return
    raise AssertionError(f"some KV blocks are not freed: vllm:kv_cache_usage_perc is {used}, not 0")


def run(code: str, url: str, folder: Path) -> str:
    """Run a program and return its standard output."""
    file = folder / "program.py"
    file.write_text(code.replace(ADDRESS, url))
    command = [sys.executable, str(file), url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("library", EXAMPLES)
def test_docs_example_and_test_program_of_each_library_run(library: str, url: str, tmp_path: Path):
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        pytest.skip(f"{library} is not installed: it is in the extra `clients`")
    said = run(EXAMPLES[library] + "\n\n" + program_path(library).read_text(), url, tmp_path)
    assert re.search(r"city='(Paris|Rome)' sunny=(True|False)", said)


@pytest.mark.parametrize("page", ["tools.md", "apis.md"])
def test_docs_examples_of_tools_and_apis_run(page: str, url: str, tmp_path: Path):
    # Skip the examples that import the calculator tool `tools_demo`. These examples need the
    # model's default chat template, which `FLAGS` replaces. `test_embedded_tools.py` tests
    # calculator calls.
    codes = [code for code in python_examples(page).values() if "tools_demo" not in code]
    assert codes
    for code in codes:
        assert run(code, url, tmp_path).strip()


def test_every_client_program_has_a_docs_example():
    assert {program_path(library) for library in EXAMPLES} == {*PROGRAMS.glob("with_*.py")}
