"""Replicas of jpaged behind one address, by Ray Serve.

    pip install ".[ray]"
    python examples/ray_serve.py                                # the embedded model, 2 replicas
    python examples/ray_serve.py --model Qwen/Qwen3-8B --replicas 1 8 --tensor-parallel-size 2

    client ──► Ray's proxy ──► Front ── PrefixRouter ──► Replica ──► engine's process, its GPUs
                               reads the prompt     └──► Replica ──► engine's process, its GPUs

A `Replica` has the whole application of `python -m jpaged.serve` and an engine of its own: the API,
streams and errors are the same. Connections are Ray's: docs/operators.md says which flags have no
effect. Ray starts replicas, again where one dies, asks after their health, drains those it takes
away, and makes more of them while requests wait.

Ray's proxy chooses a replica when it has a request's headers, before its body is there, and so
cannot know the prompt. Hence the `Front`, which the proxy calls: it reads the body and hands it on
through a handle, whose router sees it. There is one `Front`, so that one router knows all prefixes.
"""
# Types are checked where Ray is not installed, too.
# pyright: reportMissingImports=false

import argparse
import asyncio
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import FrameType
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers of each start

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from replica_choices import MAX_EXTRA_LOAD, PrefixMemory, num_replicas, pieces_of
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from jpaged import EngineConfig
from jpaged.config import MAX_NUM_SEQS
from jpaged.serve.errors import ApiError, unavailable_error
from jpaged.serve.http.exchange import DONE_EVENT, encode_event, error_response
from jpaged.serve.http.lifecycle import listen, served_hosts, serving_app
from jpaged.serve.options import Flags, read_flags

APP = "jpaged"


class Replica:
    """One engine and the server's application, which Ray calls instead of a socket."""

    async def __init__(self, flags: Flags):
        self._stack = AsyncExitStack()
        self._app, self._serving = await self._stack.enter_async_context(serving_app(flags))
        self._max_num_seqs = (await self._serving.engine.wait_ready()).max_num_seqs
        self._name = serve.get_replica_context().replica_id.unique_id
        self._watching = asyncio.create_task(self._end_with_engine())
        print(f"replica {self._name} serves", flush=True)

    async def answer(self, asked: dict[str, Any], pieces: list[bytes]) -> AsyncGenerator[Any, None]:
        """Answer a request: first (status, headers), then the body as it is made.

        Args:
            asked: Fields of an ASGI scope, and the "body".
            pieces: For the router, which sees the arguments of a call.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": asked.pop("body"), "more_body": False}]

        async def receive() -> Message:
            # A client that goes makes Ray cancel this call; nothing else comes after the body.
            return body.pop() if body else await asyncio.Future()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app({"type": "http", **asked}, receive, send)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = [*message["headers"], (b"x-replica", self._name.encode())]
                    yield message["status"], headers
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:
            running.cancel()  # the application then aborts what the engine still computes

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and its figures for Prometheus."""
        return self._name, self._serving.metrics.text(self._serving.engine.stats).decode()

    async def _end_with_engine(self) -> None:
        """End this process when its engine is gone. Ray notices at once; until it had asked after
        the health a few times, a replica that refuses everything would seem to have most room."""
        await self._serving.engine.closed.wait()
        print(f"replica {self._name} ends: {self._serving.engine.close_reason}", flush=True)
        os._exit(1)

    def check_health(self) -> None:
        """Raise unless the engine's loop goes round; Ray replaces a replica that hangs."""
        if not self._serving.is_healthy:
            raise RuntimeError("the engine does not respond")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale` goes by: what the engine's own metrics tell."""
        stats = self._serving.engine.stats
        if stats is None:
            return {"num_requests_waiting": 0, "busy": 0}
        busy = stats.num_running_seqs / self._max_num_seqs
        return {"num_requests_waiting": stats.num_waiting, "busy": busy}

    async def __del__(self) -> None:
        """End the engine. Ray calls this when no request is left, or their time is over."""
        self._watching.cancel()
        await self._stack.aclose()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has computed the longest beginning of its prompt."""

    def initialize_state(self, max_extra_load: int) -> None:
        """Ray calls this once, with `request_router_kwargs`."""
        self._max_extra_load = max_extra_load
        self._memory = PrefixMemory()
        self._in_flight: dict[str, str] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas by rank; Ray takes the first that has room."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        in_flight = Counter(self._in_flight.values())
        pieces = _pieces_of_call(pending_request)
        loads = {name: in_flight[name] for name in by_name}
        ranked = self._memory.rank(pieces, loads, self._max_extra_load)
        if ranked and pending_request is not None:
            # Now, not when it is sent: the next request of this prefix may be a moment later.
            self._memory.note(pieces, ranked[0])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has taken a request, as a rule the one that was ranked first."""
        self._in_flight[pending_request.metadata.internal_request_id] = replica_id.unique_id
        self._memory.note(_pieces_of_call(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, however it ended."""
        self._in_flight.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone: what it knew is lost."""
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id.unique_id)


def _pieces_of_call(call: PendingRequest | None) -> list[bytes]:
    """The argument `pieces` of a call of `Replica.answer`."""
    return [] if call is None else call.kwargs.get("pieces", [])


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: how many replicas there should be, within --replicas."""
    figures = context.aggregated_metrics or {}
    waiting = sum(figures.get("num_requests_waiting", {}).values())
    busy = sum(figures.get("busy", {}).values())
    return num_replicas(context.target_num_replicas, waiting, busy), {}


class Front:
    """Reads requests and hands them to replicas."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int):
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answer a request over HTTP."""
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        asked = {
            "method": request.method,
            "path": request.scope["path"],
            "raw_path": request.scope["path"].encode(),
            "query_string": request.scope["query_string"],
            "headers": list(request.headers.raw),
            "client": tuple(request.client) if request.client else None,
            "body": body,
        }
        owner = request.headers.get("authorization", "").encode()
        answer: Any = self._answers.remote(asked, pieces=pieces_of(body, owner))
        try:
            status, headers = await anext(answer)
        except RayActorError:
            return error_response(_gone())
        if request.method == "GET" and request.url.path == "/metrics" and status == 200:
            answer.cancel()  # the replica has let the client in; its own figures are not all
            return await self._metrics()
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        response = StreamingResponse(_rest(answer, is_stream), status)
        response.raw_headers = headers
        return response

    async def _body(self, request: Request) -> bytes:
        """The body, or enough of one that is too large for a replica to say so."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                break
        return bytes(body)

    async def _metrics(self) -> Response:
        """The figures of all replicas, labelled, and grouped by name as Prometheus wants them."""
        calls = self._replicas.broadcast("metrics")
        told = await calls.results_async(timeout_s=10, return_exceptions=True)
        families: dict[str, list[str]] = {}
        for name, text in (each for each in told if not isinstance(each, BaseException)):
            lines: list[str] = []
            for line in text.splitlines():
                if line.startswith("# HELP "):
                    lines = families.setdefault(line, [])
                elif line.startswith("#"):
                    lines += [] if line in lines else [line]
                else:
                    lines.append(re.sub(r"^([\w:]+)\{", rf'\1{{replica="{name}",', line))
        parts = [line for head, lines in families.items() for line in (head, *lines)]
        return Response("\n".join([*parts, ""]), media_type="text/plain; version=0.0.4")


async def _rest(answer: Any, is_stream: bool) -> AsyncGenerator[bytes, None]:
    """An answer's body as it comes. A stream says itself that its replica is gone."""
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        if not is_stream:
            raise
        yield encode_event(_gone().body) + DONE_EVENT


def _gone() -> ApiError:
    return unavailable_error("the replica is gone, and the request with it: send it again", 1)


def application(args: argparse.Namespace, flags: Flags) -> serve.Application:
    """The deployments: one `Front`, and --replicas of `Replica`."""
    low, high = args.replicas
    limits = flags.serve.limits
    router: dict[str, Any] = {
        "request_router_class": PrefixRouter,
        "request_router_kwargs": {"max_extra_load": args.max_extra_load},
    }
    replicas = serve.deployment(
        Replica,
        name="Replica",
        # An engine waits for its device more than it computes, and Ray gives GPUs by num_gpus:
        # CUDA_VISIBLE_DEVICES of a replica names its own ones.
        ray_actor_options={"num_cpus": 0, "num_gpus": args.num_gpus_per_replica},
        # All may be in flight that the engine takes, so that requests wait in the engine, whose
        # figures say so, and not in Ray; what is too much the application refuses with a 503.
        max_ongoing_requests=MAX_NUM_SEQS + limits.max_num_queued_reqs,
        autoscaling_config=AutoscalingConfig(
            min_replicas=low,
            max_replicas=high,
            look_back_period_s=15,
            upscale_delay_s=10,
            downscale_delay_s=300,
            policy=AutoscalingPolicy(policy_function=scale),
        ),
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=2,
        health_check_timeout_s=10,
        # Ray sends a replica that goes nothing new, and waits so long for what runs there.
        graceful_shutdown_timeout_s=flags.serve.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
    )
    front = serve.deployment(
        Front,
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=flags.serve.shutdown_timeout,
    )
    return front.bind(replicas.bind(flags), limits.max_body_bytes)


def read_command_line(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Flags]:
    """Ray's part of the command line, and the server's."""
    parser = argparse.ArgumentParser(
        prog="python examples/ray_serve.py",
        description="Replicas of jpaged behind one address. All flags of python -m jpaged.serve "
        "are taken too, such as --model, --host, --port, --tensor-parallel-size.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replicas", nargs=2, type=int, default=(2, 2), metavar=("MIN", "MAX"), help="2 2"
    )
    parser.add_argument(
        "--num-gpus-per-replica", type=int, metavar="N", help="as --tensor-parallel-size; no GPU: 0"
    )
    parser.add_argument(
        "--max-extra-load",
        type=int,
        default=MAX_EXTRA_LOAD,
        metavar="N",
        help="requests in flight beyond the least loaded replica with which one still gets what it "
        f"knows the prefix of ({MAX_EXTRA_LOAD})",
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="a running cluster's, or auto; unset: start one"
    )
    args, rest = parser.parse_known_args(argv)
    low, high = args.replicas
    if not 1 <= low <= high:
        parser.error(f"--replicas is {low} {high}: give at least 1 and then as many or more")
    if args.max_extra_load < 0:
        parser.error(f"--max-extra-load is {args.max_extra_load}: give 0 or more")
    return args, read_flags(rest)


def serve_until_a_signal(args: argparse.Namespace, flags: Flags, host: str, port: int) -> None:
    """Deploy, say where, wait, and drain."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    try:
        serve.run(application(args, flags), name=APP)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own
            signal.signal(number, end)
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"serving {flags.serve.model_names[0]} at {where}, for instance:")
        print(
            f"curl {where}/v1/completions -H 'Content-Type: application/json' "
            """-d '{"prompt": "Count from 1 to 20", "max_tokens": 100, "temperature": 0}'""",
            flush=True,
        )
        ended.wait()
    finally:  # also of what was deployed in part
        serve.delete(APP)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; gives the exit code."""
    args, flags = read_command_line(argv)
    host = flags.serve.host
    try:
        with listen(host, flags.serve.port) as sock:  # or the proxy fails, and Ray tries for ever
            address, port = sock.getsockname()[:2]
    except (OSError, ValueError) as error:
        print(f"cannot listen at {host}:{flags.serve.port} ({error}): use another --port or --host")
        return 1
    # The picture shows one engine's blocks, and requests of its page would reach any.
    hosts = served_hosts(flags, address)
    flags = replace(flags, serve=replace(flags.serve, dashboard=False, allowed_hosts=hosts))
    if args.ray_address:
        ray.init(args.ray_address)
    else:
        ray.init("local", include_dashboard=False)
    try:
        share = EngineConfig(**flags.engine).tensor_parallel_size
        if args.num_gpus_per_replica is None:
            args.num_gpus_per_replica = share if ray.cluster_resources().get("GPU") else 0
        if args.num_gpus_per_replica not in (0, share):
            print(
                f"--num-gpus-per-replica is {args.num_gpus_per_replica}, but a replica uses "
                f"--tensor-parallel-size {share}: give as many, or 0 for none"
            )
            return 2
        num_gpus, needed = ray.cluster_resources().get("GPU", 0), args.num_gpus_per_replica
        if not args.ray_address and args.replicas[0] * needed > num_gpus:
            print(
                f"--replicas is {args.replicas[0]} and more, of {needed} GPUs each, but there are "
                f"{num_gpus:g}: lower it, or give --num-gpus-per-replica 0"
            )
            return 2
        serve.start(http_options=HTTPOptions(host=host, port=port))
        serve_until_a_signal(args, flags, host, port)
        return 0
    finally:
        if not args.ray_address:  # in a cluster that was there, others may serve too
            serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
