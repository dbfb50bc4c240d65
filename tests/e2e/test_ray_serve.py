"""Test `examples/ray_serve.py`: routing to two replicas, a killed replica, and draining."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_options import SMALL, Engines

from jpaged import SamplingParams

ROOT = Path(__file__).parents[2]
OPTIONS = {name: SMALL[name] for name in SMALL if name != "num_compile_workers"}
OPTIONS["num_blocks"] = 129
NUM_TOKENS = 48
KEY = {"Authorization": "Bearer secret"}
BLOCK_SIZE = 16
GROUPS = [f"{name} " * 30 for name in ("tree", "bird", "lamp", "seed")]
"""Prefixes that several prompts share. Each prefix is longer than the chunks of 64 bytes that the
router compares."""


class Replicas:
    """Run the example in a process, and collect the output of the process and of its replicas."""

    def __init__(self, cache: Path):
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        command = [sys.executable, "examples/ray_serve.py", "--port=0", *flags]
        command += ["--compilation-cache-dir", str(cache), "--shutdown-timeout=20"]
        command += ["--api-key", "secret"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def wait_ready(self) -> None:
        """Wait until the replicas serve requests."""
        self.url = self.wait_for(r"serving \S+ at (http://\S+),")[0]

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each replica that has started, by the name of the replica."""
        found = re.findall(r"pid=(\d+).*replica (\w+) serves", self.log)
        return {name: int(pid) for pid, name in found}

    def wait_for(self, pattern: str, seconds: float = 120) -> list[str]:
        """Wait until the collected output matches a regular expression; return the matches."""
        found = wait_until(lambda: re.findall(pattern, self.log) or not self._alive(), seconds)
        assert isinstance(found, list), self.log
        return found

    def serving(self) -> set[str]:
        """Return the names of the replicas that appear in /metrics."""
        text = httpx.get(f"{self.url}/metrics", headers=KEY, timeout=20).text
        return set(re.findall(r'num_requests_waiting\{replica="(\w+)"', text))

    def end(self) -> None:
        if self._alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()

    def _alive(self) -> bool:
        return self.process.poll() is None

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.log += line


@dataclass
class Exchange:
    """A request and its answer. The times are results of `time.monotonic()`."""

    prompt: str
    started: float
    ended: float
    status: int
    replica: str
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return self.body["choices"][0]["text"]

    @property
    def num_cached(self) -> int:
        return self.body["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until(holds: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def fields_of(prompt: str, **more: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**fields, **more}


def ask(url: str, prompt: str) -> Exchange:
    started = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=fields_of(prompt), headers=KEY, timeout=60)
    ended, replica = time.monotonic(), answer.headers.get("x-replica", "")
    return Exchange(prompt, started, ended, answer.status_code, replica, answer.json())


@pytest.fixture
def replicas(compilation_cache: Path) -> Iterator[Replicas]:
    pytest.importorskip("ray.serve", reason='needs Ray: pip install ".[ray]"')
    started = Replicas(compilation_cache)
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


def test_ray_serve_example_routes_to_replicas_and_replaces_a_killed_one(
    replicas: Replicas, kept_engines: Engines
):
    prompts = [f"{group}{number}" for number in range(16) for group in GROUPS]
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outputs = kept_engines(**OPTIONS).generate(prompts, greedy)
    right = {p: output.outputs[0].text for p, output in zip(prompts, outputs, strict=True)}

    check_api_key_is_required(replicas.url)
    homes = check_common_prefixes_share_a_replica(replicas, prompts[:8], right)
    check_disconnect_aborts_the_request(replicas.url)
    check_killed_replica_fails_only_its_requests(replicas, prompts, right, homes)
    check_sigterm_drains(replicas, prompts[0], right)


def check_api_key_is_required(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/metrics", "/v1/models"):
        assert httpx.get(f"{url}{path}").status_code == 401
        assert httpx.get(f"{url}{path}", headers=KEY).status_code == 200


def check_common_prefixes_share_a_replica(
    replicas: Replicas, prompts: list[str], right: dict[str, str]
) -> dict[str, str]:
    """Check that prompts with the same prefix go to one replica, which has cached the prefix.

    Returns:
        The name of the replica for each prefix in `GROUPS`.
    """
    assert len(replicas.serving()) == 2
    # Send the prompts again in another order. Round-robin routing would then choose other replicas.
    first = [ask(replicas.url, prompt) for prompt in prompts[:4]]
    second = [ask(replicas.url, prompt) for prompt in reversed(prompts[4:])][::-1]
    assert [it.text for it in first + second] == [right[prompt] for prompt in prompts]
    assert [it.replica for it in first] == [it.replica for it in second]
    assert {it.replica for it in first} == replicas.serving()
    assert [it.num_cached for it in first] == [0] * 4
    for group, it in zip(GROUPS, second, strict=True):
        # The model's tokenizer encodes each ASCII character as one token.
        assert it.num_cached >= len(group) // BLOCK_SIZE * BLOCK_SIZE > 100, it
    return {group: it.replica for group, it in zip(GROUPS, first, strict=True)}


def check_disconnect_aborts_the_request(url: str) -> None:
    fields = fields_of("Count", stream=True, max_tokens=240)
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, headers=KEY) as answer:
        next(answer.iter_lines())

    def aborted() -> bool:
        text = httpx.get(f"{url}/metrics", headers=KEY, timeout=20).text
        return bool(re.search(r'request_success_total\{.*finished_reason="abort".*\} 1\.0', text))

    wait_until(aborted, 20)


def check_killed_replica_fails_only_its_requests(
    replicas: Replicas, prompts: list[str], right: dict[str, str], homes: dict[str, str]
) -> None:
    victim = homes[GROUPS[0]]
    answers: list[Exchange] = []
    with ThreadPoolExecutor(6) as threads:
        for prompt in prompts:
            threads.submit(lambda prompt=prompt: answers.append(ask(replicas.url, prompt)))
        wait_until(lambda: len(answers) >= 12)
        killed = time.monotonic()
        os.kill(replicas.pids[victim], signal.SIGKILL)
    assert len(answers) == len(prompts)

    failed = [it for it in answers if it.status != 200]
    for it in answers:
        home = next(homes[group] for group in GROUPS if it.prompt.startswith(group))
        if it.status == 200:
            assert it.text == right[it.prompt]
            if it.ended < killed or home != victim:
                assert it.replica == home
            continue
        assert home == victim
        assert it.started < killed < it.ended
        assert it.status == 503
        assert "send it again" in it.body["error"]["message"]
    assert len(failed) <= 6  # the number of threads
    assert sum(it.started > killed for it in answers) >= 30

    wait_until(lambda: len(replicas.serving() - {victim}) == 2)
    (new,) = replicas.serving() - set(homes.values())
    again = ask(replicas.url, "A prefix that no replica has cached: " * 3)
    assert again.status == 200
    assert again.replica == new  # the new replica has had no requests


def check_sigterm_drains(replicas: Replicas, prompt: str, right: dict[str, str]) -> None:
    text, url = "", f"{replicas.url}/v1/completions"
    fields = fields_of(prompt, stream=True)
    with httpx.stream("POST", url, json=fields, headers=KEY, timeout=60) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                if not text:
                    replicas.process.send_signal(signal.SIGTERM)
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == right[prompt]
    assert replicas.process.wait(60) == 0
    assert not [pid for pid in replicas.pids.values() if Path(f"/proc/{pid}").exists()]
