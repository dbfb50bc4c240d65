"""Serve replicas of jpaged behind one address with Ray Serve.

    pip install ".[ray]"
    python examples/ray_serve.py                                # the bundled model, 2 replicas
    python examples/ray_serve.py --model Qwen/Qwen3-8B --replicas 1 8 --tensor-parallel-size 2

    client ──► Ray's proxy ──► Front ── PrefixRouter ──► Replica ──► engine's process, its GPUs
                               reads the prompt     └──► Replica ──► engine's process, its GPUs

A `Replica` runs the application of `python -m jpaged.serve` with one engine, so the API, streams
and errors are the same. Ray handles the connections, so some flags of the server have no effect:
see docs/operators.md. Ray restarts failed replicas, checks health, drains replicas that it removes,
and adds replicas while requests wait.

Ray's proxy would choose a replica from the headers, before the body with the prompt arrives. So the
proxy calls the `Front`, which reads the body and calls a replica through a handle. The handle's
router sees the prompt. Only one `Front` runs, so that one router knows all prefixes.
"""
# Pyright also runs where Ray is not installed.
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

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no usage statistics

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
    """One engine with the server's ASGI application, which Ray calls directly, without a socket."""

    async def __init__(self, flags: Flags):
        self._stack = AsyncExitStack()
        self._app, self._serving = await self._stack.enter_async_context(serving_app(flags))
        self._max_num_seqs = (await self._serving.engine.wait_ready()).max_num_seqs
        self._name = serve.get_replica_context().replica_id.unique_id
        self._watching = asyncio.create_task(self._end_with_engine())
        print(f"replica {self._name} serves", flush=True)

    async def answer(
        self, fields: dict[str, Any], pieces: list[bytes]
    ) -> AsyncGenerator[Any, None]:
        """Answer a request: yield (status, headers), then the chunks of the body.

        Args:
            fields: Fields of an ASGI scope, and the request's "body".
            pieces: Digests of the prompt's prefixes. This method ignores them. The router reads
                them from the arguments of the call to choose a replica.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": fields.pop("body"), "more_body": False}]

        async def receive() -> Message:
            # Send no "http.disconnect": Ray cancels this call when the client disconnects.
            return body.pop() if body else await asyncio.Future()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app({"type": "http", **fields}, receive, send)
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
            # Cancelling the ASGI application aborts the request in the engine.
            running.cancel()

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and metrics in Prometheus format."""
        return self._name, self._serving.metrics.text(self._serving.engine.stats).decode()

    async def _end_with_engine(self) -> None:
        """End this process when the engine ends. Ray notices the end of a process immediately.

        Otherwise the replica would reject every request. The replica would then seem to have the
        lowest load, and would get most requests until health checks fail.
        """
        await self._serving.engine.closed.wait()
        print(f"replica {self._name} ends: {self._serving.engine.close_reason}", flush=True)
        os._exit(1)

    def check_health(self) -> None:
        """Raise an error if the engine's loop makes no progress; Ray then replaces the replica."""
        if not self._serving.is_healthy:
            raise RuntimeError("the engine does not respond: Ray will replace the replica")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that the autoscaling policy `scale` reads."""
        stats = self._serving.engine.stats
        if stats is None:
            return {"num_requests_waiting": 0, "busy": 0}
        busy = stats.num_running_seqs / self._max_num_seqs
        return {"num_requests_waiting": stats.num_waiting, "busy": busy}

    async def __del__(self) -> None:
        """End the engine; Ray calls this after the last request or the shutdown timeout."""
        self._watching.cancel()
        await self._stack.aclose()


class PrefixRouter(RequestRouter):
    """Choose the replica that has computed the longest prefix of a request's prompt."""

    def initialize_state(self, max_extra_load: int) -> None:
        """Initialize the router; Ray calls this once with `request_router_kwargs`."""
        self._max_extra_load = max_extra_load
        self._memory = PrefixMemory()
        self._in_flight: dict[str, str] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best one first.

        Ray chooses the first replica that can take another request.
        """
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        in_flight = Counter(self._in_flight.values())
        pieces = _pieces_of_call(pending_request)
        loads = {name: in_flight[name] for name in by_name}
        ranked = self._memory.rank(pieces, loads, self._max_extra_load)
        if ranked and pending_request is not None:
            # Record the prompt before it is sent: the next request may have the same prefix.
            self._memory.note(pieces, ranked[0])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record which replica took a request: usually the first replica of `choose_replicas`."""
        self._in_flight[pending_request.metadata.internal_request_id] = replica_id.unique_id
        self._memory.note(_pieces_of_call(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a finished or failed request from the load of its replica."""
        self._in_flight.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove the recorded prefixes and the load of a replica that died."""
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id.unique_id)


def _pieces_of_call(call: PendingRequest | None) -> list[bytes]:
    """Return the argument `pieces` of a call of `Replica.answer`.

    The result is empty for calls of other methods.
    """
    return [] if call is None else call.kwargs.get("pieces", [])


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas that Ray should run, within the bounds of --replicas.

    Ray calls this function as its autoscaling policy.
    """
    figures = context.aggregated_metrics or {}
    waiting = sum(figures.get("num_requests_waiting", {}).values())
    busy = sum(figures.get("busy", {}).values())
    return num_replicas(context.target_num_replicas, waiting, busy), {}


class Front:
    """Read HTTP requests, and send each request to a replica."""

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
        fields = {
            "method": request.method,
            "path": request.scope["path"],
            "raw_path": request.scope["path"].encode(),
            "query_string": request.scope["query_string"],
            "headers": list(request.headers.raw),
            "client": tuple(request.client) if request.client else None,
            "body": body,
        }
        owner = request.headers.get("authorization", "").encode()
        answer: Any = self._answers.remote(fields, pieces=pieces_of(body, owner))
        try:
            status, headers = await anext(answer)
        except RayActorError:
            return error_response(_gone())
        if request.method == "GET" and request.url.path == "/metrics" and status == 200:
            # The replica has accepted the API key. Return the metrics of all replicas, instead of
            # the answer of this replica.
            answer.cancel()
            return await self._metrics()
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        response = StreamingResponse(_rest(answer, is_stream), status)
        response.raw_headers = headers
        return response

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request, and stop when it has more bytes than the maximum.

        The replica rejects a request whose body has more bytes than the maximum.
        """
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                break
        return bytes(body)

    async def _metrics(self) -> Response:
        """Return the metrics of all replicas, grouped by metric; a label names the replica."""
        calls = self._replicas.broadcast("metrics")
        results = await calls.results_async(timeout_s=10, return_exceptions=True)
        families: dict[str, list[str]] = {}
        for name, text in (each for each in results if not isinstance(each, BaseException)):
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
    """Yield the chunks of an answer's body.

    If the replica dies and `is_stream` is true, the stream ends with an error event.
    """
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        if not is_stream:
            raise
        yield encode_event(_gone().body) + DONE_EVENT


def _gone() -> ApiError:
    return unavailable_error("the replica ended during the request: send the request again", 1)


def application(args: argparse.Namespace, flags: Flags) -> serve.Application:
    """Return the application: one `Front`, and as many `Replica`s as --replicas allows."""
    low, high = args.replicas
    limits = flags.serve.limits
    router: dict[str, Any] = {
        "request_router_class": PrefixRouter,
        "request_router_kwargs": {"max_extra_load": args.max_extra_load},
    }
    replicas = serve.deployment(
        Replica,
        name="Replica",
        # Reserve no CPU, because an engine mostly waits for its device. Ray assigns num_gpus GPUs
        # to each replica by CUDA_VISIBLE_DEVICES.
        ray_actor_options={"num_cpus": 0, "num_gpus": args.num_gpus_per_replica},
        # With this limit, Ray never queues requests. They wait in the engine, whose metrics count
        # them. The application answers with status 503 if too many requests wait.
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
        # Maximum number of seconds that Ray waits for running requests when it stops a replica. The
        # replica gets no new requests in this time.
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
    """Return the options of this script, and the flags of the server."""
    parser = argparse.ArgumentParser(
        prog="python examples/ray_serve.py",
        description="Serve replicas of jpaged behind one address. The flags of python -m "
        "jpaged.serve work too, such as --model, --host, --port and --tensor-parallel-size.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replicas",
        nargs=2,
        type=int,
        default=(2, 2),
        metavar=("MIN", "MAX"),
        help="bounds of autoscaling (2 2)",
    )
    parser.add_argument(
        "--num-gpus-per-replica",
        type=int,
        metavar="N",
        help="--tensor-parallel-size or 0 (0 without a GPU, else --tensor-parallel-size)",
    )
    parser.add_argument(
        "--max-extra-load",
        type=int,
        default=MAX_EXTRA_LOAD,
        metavar="N",
        help="maximum requests in flight, beyond the least loaded replica, of a replica that is "
        f"preferred for its cached prefix ({MAX_EXTRA_LOAD})",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="address of a running cluster, or auto (start a local cluster)",
    )
    args, rest = parser.parse_known_args(argv)
    low, high = args.replicas
    if not 1 <= low <= high:
        parser.error(f"--replicas is {low} {high}: pass MIN of at least 1 and MAX of at least MIN")
    if args.max_extra_load < 0:
        parser.error(f"--max-extra-load is {args.max_extra_load}: pass 0 or more")
    return args, read_flags(rest)


def serve_until_signal(args: argparse.Namespace, flags: Flags, host: str, port: int) -> None:
    """Deploy the application, print its URL, wait for SIGTERM or SIGINT, and drain."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    try:
        serve.run(application(args, flags), name=APP)
        # Replace the signal handlers that Ray has installed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"serving {flags.serve.model_names[0]} at {where}, for instance:")
        print(
            f"curl {where}/v1/completions -H 'Content-Type: application/json' "
            """-d '{"prompt": "Count from 1 to 20", "max_tokens": 100, "temperature": 0}'""",
            flush=True,
        )
        ended.wait()
    finally:  # delete the application even if its deployment failed
        serve.delete(APP)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    args, flags = read_command_line(argv)
    host = flags.serve.host
    try:
        # If the port is in use, Ray's proxy would fail and retry forever, so check the port first.
        with listen(host, flags.serve.port) as sock:
            address, port = sock.getsockname()[:2]
    except (OSError, ValueError) as error:
        print(f"cannot listen at {host}:{flags.serve.port} ({error}): use another --port or --host")
        return 1
    # Disable the dashboard: Ray could send each request of a dashboard page to another replica.
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
                f"--tensor-parallel-size {share}: pass {share}, or 0 without GPUs"
            )
            return 2
        num_gpus, needed = ray.cluster_resources().get("GPU", 0), args.num_gpus_per_replica
        if not args.ray_address and args.replicas[0] * needed > num_gpus:
            print(
                f"--replicas needs {args.replicas[0]} replicas of {needed} GPUs, but there are "
                f"{num_gpus:g} GPUs: lower --replicas, or pass --num-gpus-per-replica 0"
            )
            return 2
        serve.start(http_options=HTTPOptions(host=host, port=port))
        serve_until_signal(args, flags, host, port)
        return 0
    finally:
        # An existing cluster may run other applications, so do not shut it down.
        if not args.ray_address:
            serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
