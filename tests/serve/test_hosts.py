"""Test the check of the `Host` header, which prevents DNS rebinding."""

from collections.abc import Callable

import pytest
from serve_helpers import QUESTION, Server

from jpaged.serve.http.lifecycle import served_hosts
from jpaged.serve.options import normalize_host, read_flags

Run = Callable[..., None]
OWN = (
    *("localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1", "127.0.0.1:80", "127.9.9.9:1"),
    *("[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:1", ""),
)
STRANGE = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("evil.example:127.0.0.1", "0.0.0.0", "10.0.0.1:8000", "[::]", "[fe80::1]:8000", "[::1", "é"),
    *(
        "localhost:evil",
        "[::1]evil",
        "[::1]:80:1",
        "evil@localhost",
        "localhost@evil",
        "::1:80:evil",
    ),
)
PATHS = ("/", "/metrics", "/v1/models", "/version", "/picture/events", "/nowhere", "/health")


def test_only_local_and_allowed_host_headers_are_served(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"prompt": QUESTION, "max_tokens": 1}
        for host in (*OWN, "box.lan:8000", "llm.example.com"):
            headers = {"Host": host}
            assert (await server.http.get("/version", headers=headers)).status_code == 200, host
        for host in STRANGE:
            headers = {b"Host": host.encode()}
            for path in PATHS:
                answer = await server.http.get(path, headers=headers)
                assert answer.status_code == 403, (host, path)
            error = answer.json()["error"]
            assert "--allowed-hosts" in error["message"]
            assert (await server.http.post("/v1/completions", json=asked, headers=headers)).is_error
        assert server.serving.metrics is not None
        assert server.engine.stats().num_running == 0

    serve(scenario, allowed_hosts=("box.lan", "llm.example.com"))


@pytest.mark.parametrize("allowed", [("*",), None])
def test_every_host_header_is_accepted_if_allowed_hosts_is_unset_or_a_wildcard(
    serve: Run, allowed: tuple[str, ...] | None
):
    async def scenario(server: Server) -> None:
        for host in (*OWN, *STRANGE):
            headers = {b"Host": host.encode()}
            assert (await server.http.get("/version", headers=headers)).status_code == 200, host

    serve(scenario, allowed_hosts=allowed)


@pytest.mark.parametrize(
    ("argv", "address", "expected"),
    [
        ((), "127.0.0.1", ("127.0.0.1",)),
        (("--host", "box.lan"), "127.0.1.1", ("box.lan",)),
        (("--host", "::1"), "::1", ("::1",)),
        (("--api-key", "k"), "127.0.0.1", None),
        (("--host", "0.0.0.0"), "0.0.0.0", None),
        (("--host", "::"), "::", None),
        (("--host", "10.0.0.1"), "10.0.0.1", None),
        (("--allowed-hosts", "A.b:1", "*"), "127.0.0.1", ("a.b", "*", "127.0.0.1")),
        (("--allowed-hosts", "a", "--api-key", "k"), "127.0.0.1", ("a", "127.0.0.1")),
        (("--allowed-hosts", "a", "--host", "0.0.0.0"), "0.0.0.0", ("a", "0.0.0.0")),
    ],
)
def test_allowed_hosts_depend_on_flags_and_listening_address(
    argv: tuple[str, ...], address: str, expected: tuple[str, ...] | None
):
    assert served_hosts(read_flags([*argv]), address) == expected


def test_host_names_are_compared_without_ports_and_brackets():
    assert normalize_host(" Example.com.:80 ") == "example.com"
    assert normalize_host("[::1]:80") == normalize_host("::1") == "::1"
