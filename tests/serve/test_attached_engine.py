"""Test `jpaged.serve.serve`, which serves an engine of the calling process over HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stub.stub_engine import StubEngine

from jpaged import Engine
from jpaged.serve import serve
from jpaged.serve.engine.worker import EngineWorker
from jpaged.serve.http import attached
from jpaged.serve.options import make_serve_config

SCRIPT = """
import sys

from examples.plain_jax_llama import load
from jpaged import Engine, SamplingParams, Tokenizer
from jpaged.config import EMBEDDED_MODEL
from jpaged.serve import serve
from jpaged.serve.engine.worker import EngineWorker
from jpaged.serve.http import attached

model, params = load(EMBEDDED_MODEL)
options = {"num_blocks": 129, "max_num_seqs": 8, "max_num_batched_tokens": 64}
tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL).hf_tokenizer
cache = {"compilation_cache_dir": sys.argv[1]}
engine = Engine(model, params=params, tokenizer=tokenizer, max_model_len=256, **options, **cache)
serve(engine, port=0, model_names=("mine",), log_requests=False)
engine.check_integrity()
greedy = SamplingParams(temperature=0.0, max_tokens=64)
print(engine.generate("Count from 3 to 7", greedy)[0].outputs[0].text)
"""


@pytest.fixture
def served(compilation_cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `SCRIPT` in a process. Yield the process, and the address of its HTTP server."""
    command = [sys.executable, "-c", SCRIPT, str(compilation_cache)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe)
    log = ""
    for line in process.stderr or ():
        log += line
        if found := re.search(r"serving mine at (http://\S+)", line):
            yield process, found[1]
            break
    else:
        pytest.fail(log)
    process.kill()
    process.communicate()


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


@pytest.mark.full
def test_server_of_a_custom_jax_model_answers_requests_and_shows_the_dashboard(
    served: tuple[subprocess.Popen[str], str],
):
    process, url = served
    prompt = {"prompt": "Count from 3 to 7", "temperature": 0, "max_tokens": 64}
    answer = json.load(fetch(f"{url}/v1/completions", prompt))
    assert answer["choices"][0]["text"].strip() == "3, 4, 5, 6, 7"
    message = {"role": "user", "content": "Count from 3 to 7"}
    chat = {"messages": [message], "temperature": 0, "stream": True, "max_tokens": 8}
    assert b"[DONE]" in fetch(f"{url}/v1/chat/completions", chat).read()
    schema = {"type": "integer", "minimum": 10, "maximum": 99}
    constrained = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"messages": [message], "response_format": constrained, "max_tokens": 8}
    found = json.load(fetch(f"{url}/v1/chat/completions", body))
    assert 10 <= int(found["choices"][0]["message"]["content"]) <= 99
    assert b"<html" in fetch(url).read()
    assert fetch(f"{url}/picture/events").readline().startswith((b"event:", b"data:", b"retry:"))
    assert b"vllm:" in fetch(f"{url}/metrics").read()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.strip() == "3, 4, 5, 6, 7"  # the engine can be used again


def test_engine_without_a_tokenizer_is_not_served():
    engine = cast(Engine, SimpleNamespace(tokenizer_folder=None))
    with pytest.raises(ValueError, match="the engine has no tokenizer: pass tokenizer="):
        serve(engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prot": 1}, TypeError, "prot is not an option of the server"),
        ({"limits": 1}, TypeError, "limits is not an option"),
        ({"port": -1}, ValueError, "port"),
        ({"max_body_bytes": 9, "max_total_body_bytes": 8}, ValueError, "use 9 or more"),
    ],
)
def test_error_names_the_wrong_option_of_the_serve_function(
    options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        make_serve_config(options)


def test_serve_function_accepts_the_options_port_and_max_connections():
    config = make_serve_config({"port": 9000, "max_connections": 7})
    assert (config.port, config.limits.max_connections) == (9000, 7)


@pytest.mark.full
def test_serve_function_raises_an_error_if_the_port_is_in_use():
    engine = cast(Engine, StubEngine())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RuntimeError, match=r"the HTTP server ended \(exit code 1\)"):
            serve(engine, port=other.getsockname()[1])


@pytest.mark.full
def test_serve_function_returns_if_interrupted_before_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch,
):
    class Interrupted(EngineWorker):
        def run(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().run()

    monkeypatch.setattr(attached, "EngineWorker", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    serve(cast(Engine, StubEngine()), port=0)
    assert signal.getsignal(signal.SIGINT) is before
