"""What completions and chats have in common: from jobs to an answer, whole or as it grows."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jpaged import SamplingParams, TextDelta
from jpaged.serve.answers import Answer, Tally
from jpaged.serve.errors import not_serving
from jpaged.serve.exchange import DONE, json_bytes, large_json
from jpaged.serve.protocol import SamplingFields
from jpaged.serve.run import Job, News, Run
from jpaged.serve.serving import Serving

Body = dict[str, Any]

_MANY_TOKENS = 128
"""More of them, each with up to twenty candidates, are written beside the event loop."""

_VERY_MANY_TOKENS = 64 * 1024
"""More of them are written there though none has candidates."""


class Choice(ABC):
    """Writes one answer as an endpoint's clients know it."""

    @abstractmethod
    def grow(self, delta: TextDelta, tally: Tally) -> list[Body]:
        """What a stream says of its growth: a choice for each of its chunks."""

    @abstractmethod
    def whole(self, answer: TextDelta, tally: Tally) -> Body:
        """The choice of an answer that is not streamed."""


class Generation(ABC):
    """A request for answers.

    Args:
        serving: The server.
        asked: What is asked.
        request_id: Names the request, and the jobs made of it.
        model: As the client calls it.
        client: Whose it is.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self, serving: Serving, asked: SamplingFields, request_id: str, model: str, client: str
    ):
        self.serving, self.request_id = serving, request_id
        self._asked, self._model, self._client = asked, model, client
        self._created = int(time.time())
        self._event_start: bytes | None = None
        self._begun: set[tuple[int, int]] = set()  # answers, by prompt and number

    @property
    @abstractmethod
    def num_prompts(self) -> int:
        """Prompts to answer."""

    @property
    def tells_prompts(self) -> bool:
        """Whether an answer begins with the log-probabilities of its prompt."""
        return False

    @abstractmethod
    async def jobs(self) -> list[Job]:
        """What to ask of the engine, one job a prompt.

        Raises:
            ApiError: a prompt or a parameter is not acceptable.
        """

    @abstractmethod
    async def choices(self, jobs: Sequence[Job]) -> list[Choice]:
        """Who writes the answers: `n` for each job."""

    def job(self, index: int, token_ids: list[int], params: SamplingParams) -> Job:
        """The job of one prompt."""
        asked = self._asked
        name = f"{self.request_id}-{index}"
        salt = self.serving.cache_salt(self._client, asked.cache_salt)
        return Job(name, token_ids, params, asked.priority, salt)

    def told(self, news: News) -> News:
        """The news as far as they are told of."""
        return news

    def opening(self, tally: Tally) -> Body:
        """What a body has beside the choices, once."""
        return {}

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer: one piece of JSON, or events.

        Raises:
            ApiError: the request is not acceptable, or failed.
        """
        asked, serving = self._asked, self.serving
        seats = max(asked.n, asked.best_of or 0, asked.beam_width or 0) * self.num_prompts
        with serving.admission.admit(self._client, seats):
            try:
                async with asyncio.timeout(serving.config.limits.queue_timeout):
                    jobs = await self.jobs()
                    choices = await self.choices(jobs)
            except TimeoutError:
                raise not_serving("aborted: the request waited too long for its turn") from None
            tally = Tally([job.prompt_token_ids for job in jobs])
            async with serving.run(jobs) as run:
                if not asked.stream:
                    yield await self._whole(run, choices, tally)
                    return
                async for news in run:
                    if self.tells_prompts and self._open_answers(news, tally):
                        write = partial(self._events, news, choices, tally, encode=large_json)
                        yield await serving.beside(write)
                    elif events := self._events(news, choices, tally):
                        yield events
            if asked.options.include_usage:
                yield self._event([], tally.usage())
            yield DONE

    async def _whole(self, run: Run, choices: list[Choice], tally: Tally) -> bytes:
        answers = [Answer() for _ in choices]
        async for news in run:
            for each in map(self.told, news):
                for delta in tally.take(each, self._asked.n):
                    answers[self._place(each, delta)].add(delta)
        usage = tally.usage()

        def write(encode: Callable[[Body], bytes]) -> bytes:
            whole = zip(choices, answers, strict=True)
            body = self._head(self.whole_object) | self.opening(tally)
            body["choices"] = [choice.whole(answer.as_delta(), tally) for choice, answer in whole]
            return encode(body | {"usage": usage})

        has_scores = bool(tally.prompt_logprobs) or any(each.logprobs for each in answers)
        if usage["total_tokens"] <= (_MANY_TOKENS if has_scores else _VERY_MANY_TOKENS):
            return write(json_bytes)
        return await self.serving.beside(lambda: write(large_json))

    def _open_answers(self, news: list[News], tally: Tally) -> bool:
        """Whether an answer begins, and with it the log-probabilities of a long prompt are told."""
        begun = {(each.index, delta.index) for each in news for delta in each.delta.deltas}
        begun -= self._begun
        self._begun |= begun
        return any(len(tally.prompts[index]) > _MANY_TOKENS for index, _ in begun)

    def _events(
        self,
        news: list[News],
        choices: list[Choice],
        tally: Tally,
        encode: Callable[[list[Body]], bytes] = json_bytes,
    ) -> bytes:
        """What a stream says of news."""
        events, with_usage = [], self._asked.options.continuous_usage_stats
        for each in map(self.told, news):
            for delta in tally.take(each, self._asked.n):
                for choice in choices[self._place(each, delta)].grow(delta, tally):
                    usage = tally.usage() if with_usage else None
                    events.append(self._event([choice], usage, encode))
        return b"".join(events)

    def _event(
        self,
        choices: list[Body],
        usage: Body | None = None,
        encode: Callable[[list[Body]], bytes] = json_bytes,
    ) -> bytes:
        """A chunk as an event. What all chunks of a stream have is made JSON once."""
        if self._event_start is None:
            self._event_start = b"data: " + json_bytes(self._head(self.chunk_object))[:-1]
        tail = b"}\n\n" if usage is None else b',"usage":%b}\n\n' % json_bytes(usage)
        return b'%b,"choices":%b%b' % (self._event_start, encode(choices), tail)

    def _head(self, kind: str) -> Body:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _place(self, news: News, delta: TextDelta) -> int:
        return news.index * self._asked.n + delta.index


def without_answer(news: News) -> News:
    """The news of a prompt that is only to be scored: the answer has no tokens."""
    index, delta = news
    empty = [
        replace(d, text="", token_ids=(), logprobs=d.logprobs and [], stop_reason=None)
        for d in delta.deltas
    ]
    ended = [replace(d, finish_reason="length") if d.finish_reason == "stop" else d for d in empty]
    return News(index, replace(delta, deltas=ended))
