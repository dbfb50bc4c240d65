"""State of the server that all endpoints share: configuration, engine, tokenizer and metrics."""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from enum import Enum
from typing import TypeVar

from jpaged import errors
from jpaged.serve.engine.client import EngineClient, RequestUpdate, UpdateStream
from jpaged.serve.engine.messages import EngineInfo, EngineRequest
from jpaged.serve.engine.tokenizing import TokenizingService
from jpaged.serve.errors import ApiError, unavailable_error
from jpaged.serve.http.access import InFlightLimiter
from jpaged.serve.http.metrics import Metrics, RequestMeter
from jpaged.serve.options import ServeConfig

T = TypeVar("T")


class Phase(Enum):
    """Phase of the server's lifecycle."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class ServerState:
    """State of one server.

    Attributes:
        config: Options of the server.
        phase: Current phase of the lifecycle.
        start_time: Unix time of the start, in seconds.
    """

    def __init__(self, config: ServeConfig):
        self.config = config
        self.phase = Phase.STARTING
        self.start_time = int(time.time())
        self._salt_secret = secrets.token_bytes(32)
        self._engine: EngineClient | None = None
        self._tokenizing: TokenizingService | None = None
        self._metrics: Metrics | None = None
        self._in_flight: InFlightLimiter | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answer")

    def open(self, engine: EngineClient, tokenizing: TokenizingService, info: EngineInfo) -> None:
        """Begin to serve with this engine, unless the server is already shutting down."""
        self._engine, self._tokenizing = engine, tokenizing
        self._in_flight = InFlightLimiter(self.config.limits, info.max_num_seqs)
        self._metrics = Metrics(
            self.config.model_names[0],
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            cache_dtype=info.cache_dtype,
        )
        if self.phase is Phase.STARTING:
            self.phase = Phase.SERVING

    @property
    def engine(self) -> EngineClient:
        """Client of the engine; raises ApiError while the server is starting."""
        return _require_started(self._engine)

    @property
    def tokenizing(self) -> TokenizingService:
        """Tokenizing service; raises ApiError while the server is starting."""
        return _require_started(self._tokenizing)

    @property
    def metrics(self) -> Metrics:
        """Metrics of the server; raises ApiError while the server is starting."""
        return _require_started(self._metrics)

    @property
    def num_requests(self) -> int:
        """Number of requests in flight."""
        return 0 if self._in_flight is None else self._in_flight.num_requests

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is ready and its last heartbeat is recent."""
        if self._engine is None or not self._engine.is_ready:
            return False
        return time.monotonic() - self._engine.last_heartbeat < self.config.limits.health_timeout

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.phase is Phase.SERVING and self.is_healthy

    def check_engine(self) -> None:
        """Check that the engine can serve a request.

        Raises:
            ApiError: 503 if the engine is starting, has ended, or does not respond.
        """
        if not self.engine.is_ready:
            raise unavailable_error("the engine is not running")
        if not self.is_healthy:
            raise unavailable_error(
                "the engine does not respond: ask another server, or try again later"
            )

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run a slow function in the thread that encodes answers, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def stop_admitting(self) -> None:
        """Refuse new requests; requests in flight continue."""
        self.phase = Phase.DRAINING

    def admit(self, client: str, num_sequences: int) -> AbstractContextManager[None]:
        """Return a context manager that admits a request; see `InFlightLimiter.admit`.

        Raises:
            ApiError: 503 if the server is starting or shutting down.
        """
        in_flight = _require_started(self._in_flight)
        if self.phase is Phase.DRAINING:
            raise unavailable_error("the server is shutting down")
        return in_flight.admit(client, num_sequences)

    def model_name(self, requested: str | None) -> str:
        """Return the requested name of the model, or the first name if `requested` is None.

        Raises:
            ApiError: 404 if the model does not have this name.
        """
        names = self.config.model_names
        if requested is None or requested in names:
            return requested or names[0]
        problem = f"the model {requested[:100]!r} does not exist: use {', '.join(names)}"
        info = errors.ErrorInfo("model", (problem,), shows_path=False)
        raise ApiError(404, info, code="model_not_found")

    def cache_salt(self, client: str, requested: str | None) -> str | None:
        """Return the prefix-cache salt of a client's request.

        If API keys must not share cached prefixes, the salt contains a digest of the client. The
        key cannot be derived from the salt.

        Args:
            client: Identifier of the client, from `client_id`.
            requested: Salt from the request, which may separate requests with the same API key.
        """
        config = self.config
        if not config.api_keys or config.share_prefix_cache_across_keys:
            return requested
        # The first 32 characters of the returned salt depend only on the API key. The salt from the
        # request follows these characters, so clients with different keys never have equal salts.
        key_salt = hmac.digest(self._salt_secret, client.encode(), "sha256").hex()[:32]
        return key_salt + (requested or "")

    @asynccontextmanager
    async def run(self, requests: Sequence[EngineRequest]) -> AsyncIterator[UpdateStream]:
        """Run requests with `EngineClient.run`, record their metrics, and enforce the timeouts."""
        limits, loop = self.config.limits, asyncio.get_running_loop()
        meters = [RequestMeter(self.metrics, request) for request in requests]

        def record_update(update: RequestUpdate) -> None:
            meters[update.index].record_delta(update.delta)

        async with self.engine.run(requests, record_update) as run:
            timers = [
                loop.call_later(limits.queue_timeout, _expire_in_queue, run),
                loop.call_later(limits.request_timeout, _expire, run),
            ]
            try:
                yield run
            finally:
                for timer in timers:
                    timer.cancel()
                for meter in meters:  # `end` has no effect if the request has ended already
                    meter.end(run.end_reason)


def _require_started(component: T | None) -> T:
    if component is None:
        raise unavailable_error("the server is starting")
    return component


def _expire_in_queue(run: UpdateStream) -> None:
    if not run.has_started:
        run.fail(unavailable_error("aborted: the request waited too long for its turn"))


def _expire(run: UpdateStream) -> None:
    run.fail(unavailable_error("aborted: the request took too long"))
