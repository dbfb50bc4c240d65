"""What the endpoints share: the server's names, limits, engine and state."""

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
from jpaged.serve.engine.client import EngineClient, News, Run
from jpaged.serve.engine.messages import EngineRequest, Ready
from jpaged.serve.engine.tokenizing import Tokenizing
from jpaged.serve.errors import ApiError, not_serving
from jpaged.serve.http.access import InFlight
from jpaged.serve.http.metrics import Meter, Metrics
from jpaged.serve.options import ServeConfig

T = TypeVar("T")


class Phase(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Serving:
    """The server's state.

    Attributes:
        config: As asked.
        phase: Where it is in its life.
        started: When it was made, in seconds since 1970.
    """

    def __init__(self, config: ServeConfig):
        self.config = config
        self.phase = Phase.STARTING
        self.started = int(time.time())
        self._salt_secret = secrets.token_bytes(32)
        self._engine: EngineClient | None = None
        self._tokenizing: Tokenizing | None = None
        self._metrics: Metrics | None = None
        self._in_flight: InFlight | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answer")

    def open(self, engine: EngineClient, tokenizing: Tokenizing, info: Ready) -> None:
        """Serve with this engine from now on, unless a signal has ended it before."""
        self._engine, self._tokenizing = engine, tokenizing
        self._in_flight = InFlight(self.config.limits, info.max_num_seqs)
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
        """The engine's client; ApiError while there is none."""
        return _opened(self._engine)

    @property
    def tokenizing(self) -> Tokenizing:
        """The tokenizer's; ApiError while there is none."""
        return _opened(self._tokenizing)

    @property
    def metrics(self) -> Metrics:
        """The figures; ApiError while there are none."""
        return _opened(self._metrics)

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return 0 if self._in_flight is None else self._in_flight.num_requests

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's loop goes round."""
        if self._engine is None or not self._engine.is_ready:
            return False
        return time.monotonic() - self._engine.seen < self.config.limits.health_timeout

    @property
    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.phase is Phase.SERVING and self.is_healthy

    def check_engine(self) -> None:
        """Check that a request can be expected to get its tokens.

        Raises:
            ApiError: 503: there is no engine yet, none any more, or its loop stands still.
        """
        if not self.engine.is_ready:
            raise not_serving("the engine is not running")
        if not self.is_healthy:
            raise not_serving("the engine does not respond: ask another server, or try again later")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which takes long, in the one thread there is for that; gives its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def stop_admitting(self) -> None:
        """Admit no more requests; those in flight go on."""
        self.phase = Phase.DRAINING

    def admit(self, client: str, num_sequences: int) -> AbstractContextManager[None]:
        """Takes in a request for as long as the block lasts, as of `InFlight`.

        Raises:
            ApiError: 503: the server starts or drains; on entry as of `InFlight.admit`.
        """
        in_flight = _opened(self._in_flight)
        if self.phase is Phase.DRAINING:
            raise not_serving("the server is shutting down")
        return in_flight.admit(client, num_sequences)

    def model_name(self, asked: str | None) -> str:
        """The model's name, as the client calls it.

        Raises:
            ApiError: no model here is called so.
        """
        names = self.config.model_names
        if asked is None or asked in names:
            return asked or names[0]
        problem = f"the model {asked[:100]!r} does not exist; here is {', '.join(names)}"
        info = errors.ErrorInfo("model", (problem,), shows_path=False)
        raise ApiError(404, info, code="model_not_found")

    def cache_salt(self, client: str, asked: str | None) -> str | None:
        """The salt of a client's prompts in the prefix cache. Where each key has a cache of its
        own the salt is made of the key, which cannot be found from it.

        Args:
            client: As `client_of` has it.
            asked: The request's own salt, which separates within a key.
        """
        config = self.config
        if not config.api_keys or config.share_prefix_cache_across_keys:
            return asked
        # Of one length, so that no salt of one key, whatever is asked, is one of another.
        own = hmac.digest(self._salt_secret, client.encode(), "sha256").hex()[:32]
        return own + (asked or "")

    @asynccontextmanager
    async def run(self, requests: Sequence[EngineRequest]) -> AsyncIterator[Run]:
        """`EngineClient.run` within the limits of time."""
        limits, loop = self.config.limits, asyncio.get_running_loop()
        meters = [Meter(self.metrics, request) for request in requests]

        def watch(news: News) -> None:
            meters[news.index].note(news.delta)

        async with self.engine.run(requests, watch) as run:
            timers = [
                loop.call_later(limits.queue_timeout, _expire_in_queue, run),
                loop.call_later(limits.request_timeout, _expire, run),
            ]
            try:
                yield run
            finally:
                for timer in timers:
                    timer.cancel()
                for meter in meters:  # of those that are not over
                    meter.end(run.why_ended)


def _opened(part: T | None) -> T:
    if part is None:
        raise not_serving("the server is starting")
    return part


def _expire_in_queue(run: Run) -> None:
    if not run.has_started:
        run.fail(not_serving("aborted: the request waited too long for its turn"))


def _expire(run: Run) -> None:
    run.fail(not_serving("aborted: the request took too long"))
