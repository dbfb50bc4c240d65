"""From a request for completions or a chat to its answer, whole or as it grows."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jpaged import Logprob, SamplingParams, TextDelta
from jpaged.serve.api_errors import not_serving
from jpaged.serve.engine_client import News, Run
from jpaged.serve.exchange import DONE, json_bytes, large_json
from jpaged.serve.messages import EngineRequest
from jpaged.serve.protocol import ChatRequest, CompletionRequest, SamplingFields
from jpaged.serve.serving import Serving

Candidates = Mapping[int, Logprob]
TokenText = Callable[[int], str]

LOWEST = -9999.0
"""Stands for a probability of 0, whose logarithm JSON cannot write."""

Body = dict[str, Any]

MANY_TOKENS = 128
"""Tokens with candidates, up to twenty each, above which an answer is encoded in a thread."""

_VERY_MANY_TOKENS = 64 * 1024
"""Tokens without candidates above which an answer is encoded in a thread."""


class CompletionLogprobs:
    """Builds the `logprobs` of a choice of `/v1/completions`, piece by piece.

    Args:
        token_text: The text of a token alone.
        as_ids: Write "token_id:17" instead of texts.
    """

    def __init__(self, token_text: TokenText, *, as_ids: bool):
        self._token_text, self._as_ids = token_text, as_ids
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], candidates: Sequence[Candidates | None]
    ) -> dict[str, Any]:
        """The next tokens' part; the first token of a text has no candidates."""
        texts = [self._text(token_id) for token_id in token_ids]
        found = list(zip(token_ids, candidates, strict=True))
        return {
            "text_offset": [self._place(text) for text in texts],
            "token_logprobs": [None if c is None else finite(c[t].logprob) for t, c in found],
            "tokens": texts,
            "top_logprobs": [None if c is None else self._top(c) for _, c in found],
        }

    def _place(self, text: str) -> int:
        offset = self._offset
        self._offset += len(text)
        return offset

    def _top(self, candidates: Candidates) -> dict[str, float]:
        """By text; of several tokens with one text the likeliest."""
        top: dict[str, float] = {}
        for token_id, found in candidates.items():
            text, logprob = self._text(token_id), finite(found.logprob)
            top[text] = max(logprob, top.get(text, LOWEST))
        return top

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._token_text(token_id)


def joined(pieces: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Pieces of `CompletionLogprobs` as one."""
    return {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}


def chat_logprobs(
    token_ids: Sequence[int],
    candidates: Sequence[Candidates],
    num_top: int,
    token_text: TokenText,
    *,
    as_ids: bool,
) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/chat/completions`.

    Args:
        token_ids: The tokens.
        candidates: Of each token.
        num_top: Candidates to tell of.
        token_text: The text of a token alone.
        as_ids: Write "token_id:17" instead of texts.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        shown = f"token_id:{token_id}" if as_ids else text
        return {"token": shown, "logprob": finite(logprob), "bytes": list(text.encode())}

    def whole(token_id: int, found: Candidates) -> dict[str, Any]:
        best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
        top = [entry(t, own.logprob) for t, own in best]
        return entry(token_id, found[token_id].logprob) | {"top_logprobs": top}

    pairs = zip(token_ids, candidates, strict=True)
    return {"content": [whole(t, found) for t, found in pairs], "refusal": None}


def prompt_logprobs(candidates: Sequence[Candidates | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token its candidates by id, none for the first."""
    return [
        None
        if found is None
        else {
            str(token_id): {
                "logprob": finite(own.logprob),
                "rank": own.rank,
                "decoded_token": own.decoded_token,
            }
            for token_id, own in found.items()
        }
        for found in candidates
    ]


def finite(logprob: float) -> float:
    """A logarithm that JSON can write."""
    return max(logprob, LOWEST)


@dataclass
class Answer:
    """One answer, put together from its deltas."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    last: TextDelta = field(default_factory=lambda: TextDelta(""))

    def add(self, delta: TextDelta) -> None:
        """Take in its growth."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.last = delta

    def as_delta(self) -> TextDelta:
        """All of it as one."""
        return TextDelta(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            logprobs=self.logprobs,
            index=self.last.index,
        )


class Tally:
    """What the prompts of a request have brought so far.

    Attributes:
        prompts: The prompts' token ids.
        prompt_logprobs: By the prompt's number, where they were asked for, as far as they have
            come: all before the first of the answer.
    """

    def __init__(self, prompts: list[list[int]]):
        self.prompts = prompts
        self.prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        self._num_output_tokens = 0
        self._cached: dict[int, int] = {}
        self._ended: set[tuple[int, int]] = set()

    def take(self, news: News, num_answers: int) -> list[TextDelta]:
        """Count news; gives what its answers, so many, grew by.

        If the request was cut short the last deltas are made here, so that each answer ends.
        """
        index, delta = news
        self._cached[index] = delta.num_cached_tokens or self._cached.get(index, 0)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.setdefault(index, []).extend(delta.prompt_logprobs)
        grown = list(delta.deltas)
        self._num_output_tokens += sum(len(each.token_ids) for each in grown)
        ended = [each.index for each in grown if each.finished]
        self._ended |= {(index, k) for k in ended}
        if delta.finished and not ended:
            rest = [k for k in range(num_answers) if (index, k) not in self._ended]
            grown += [TextDelta("", finish_reason="abort", index=k) for k in rest]
        return grown

    def usage(self) -> dict[str, Any]:
        """The token counts, as OpenAI names them."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "completion_tokens": self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


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
        request_id: Names the request, and the requests made of it.
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
    async def requests(self) -> list[EngineRequest]:
        """What to ask of the engine, one request a prompt.

        Raises:
            ApiError: a prompt or a parameter is not acceptable.
        """

    @abstractmethod
    async def choices(self, requests: Sequence[EngineRequest]) -> list[Choice]:
        """The writers of the answers: `n` for each request."""

    def request(self, index: int, token_ids: list[int], params: SamplingParams) -> EngineRequest:
        """The request of one prompt."""
        asked = self._asked
        name = f"{self.request_id}-{index}"
        salt = self.serving.cache_salt(self._client, asked.cache_salt)
        return EngineRequest(name, token_ids, params, asked.priority, salt)

    def told(self, news: News) -> News:
        """The news as far as they are told of."""
        return news

    def opening(self, tally: Tally) -> Body:
        """The fields of a whole answer that are not its choices."""
        return {}

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer: one piece of JSON, or events.

        Raises:
            ApiError: the request is not acceptable, or failed.
        """
        asked, serving = self._asked, self.serving
        seats = max(asked.n, asked.best_of or 0, asked.beam_width or 0) * self.num_prompts
        with serving.in_flight.admit(self._client, seats):
            try:
                async with asyncio.timeout(serving.config.limits.queue_timeout):
                    requests = await self.requests()
                    choices = await self.choices(requests)
            except TimeoutError:
                raise not_serving("aborted: the request waited too long for its turn") from None
            tally = Tally([request.prompt_token_ids for request in requests])
            async with serving.run(requests) as run:
                if not asked.stream:
                    yield await self._whole(run, choices, tally)
                    return
                async for news in run:
                    if self.tells_prompts and self._open_answers(news, tally):
                        write = partial(self._events, news, choices, tally, encode=large_json)
                        yield await serving.in_thread(write)
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
        if usage["total_tokens"] <= (MANY_TOKENS if has_scores else _VERY_MANY_TOKENS):
            return write(json_bytes)
        return await self.serving.in_thread(lambda: write(large_json))

    def _open_answers(self, news: list[News], tally: Tally) -> bool:
        """Whether an answer begins, and with it the log-probabilities of a long prompt are told."""
        begun = {(each.index, delta.index) for each in news for delta in each.delta.deltas}
        begun -= self._begun
        self._begun |= begun
        return any(len(tally.prompts[index]) > MANY_TOKENS for index, _ in begun)

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


class CompletionChoice(Choice):
    """Writes one answer.

    Args:
        asked: The request.
        index: The choice's.
        prompt_index: Which prompt it answers.
        prompt_text: What to begin with, if that is asked.
        token_text: The text of a token alone.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        index: int,
        prompt_index: int,
        prompt_text: str,
        token_text: TokenText,
    ):
        self._asked, self._index, self._prompt_index = asked, index, prompt_index
        self._prompt_text = prompt_text
        as_ids = asked.return_tokens_as_token_ids
        self._logprobs = CompletionLogprobs(token_text, as_ids=as_ids)
        self._is_open = False

    def grow(self, delta: TextDelta, tally: Tally) -> list[Body]:
        """One choice; the first has the prompt, if that is asked."""
        is_first, self._is_open = not self._is_open, True
        prompt = tally.prompts[self._prompt_index]
        choice = {
            "index": self._index,
            "text": (self._prompt_text if is_first else "") + delta.text,
            "logprobs": self._pieces(delta, tally, with_prompt=is_first and self._asked.echo),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            choice |= {"prompt_token_ids": prompt} if is_first else {}
        return [choice]

    def whole(self, answer: TextDelta, tally: Tally) -> Body:
        """One choice."""
        (choice,) = self.grow(answer, tally)
        if self._asked.prompt_logprobs is not None:
            found = tally.prompt_logprobs.get(self._prompt_index, [None])
            choice["prompt_logprobs"] = prompt_logprobs(found)
        return choice

    def _pieces(self, delta: TextDelta, tally: Tally, *, with_prompt: bool) -> Body | None:
        if self._asked.logprobs is None:
            return None
        pieces = []
        if with_prompt:
            ids = tally.prompts[self._prompt_index]
            scores = tally.prompt_logprobs.get(self._prompt_index) or [None] * len(ids)
            pieces.append(self._logprobs.piece(ids, scores))
        pieces.append(self._logprobs.piece(delta.token_ids, delta.logprobs or ()))
        return joined(pieces)


class Completion(Generation):
    """One request of `/v1/completions`."""

    whole_object = chunk_object = "text_completion"
    _asked: CompletionRequest

    @property
    def num_prompts(self) -> int:
        """Prompts to answer."""
        return len(self._asked.prompts)

    @property
    def tells_prompts(self) -> bool:
        """Whether a stream begins with them."""
        return self._asked.echo and self._asked.logprobs is not None

    async def requests(self) -> list[EngineRequest]:
        """One a prompt. A prompt that is only scored is so with the first token after it."""
        asked = self._asked
        scored = asked.logprobs if asked.echo else None
        scored = asked.prompt_logprobs if scored is None else scored
        params = asked.sampling_params(
            max(asked.max_tokens, 1), logprobs=asked.logprobs, prompt_logprobs=scored
        )
        special, keep = asked.add_special_tokens, asked.truncate_prompt_tokens
        texts = self.serving.tokenizing
        last = texts.num_kept(asked.max_tokens, keep)
        requests = []
        for i, prompt in enumerate(asked.prompts):
            path = f"prompt[{i}]" if self.num_prompts > 1 else "prompt"
            ids = await texts.encode(prompt, path, add_special_tokens=special, last=last)
            ids = texts.fitted(ids, path, asked.max_tokens, keep)
            requests.append(self.request(i, ids, params))
        return requests

    async def choices(self, requests: Sequence[EngineRequest]) -> list[Choice]:
        """The writers of the answers."""
        asked, texts = self._asked, self.serving.tokenizing
        found: list[Choice] = []
        for i, request in enumerate(requests):
            text = await texts.decode(request.prompt_token_ids) if asked.echo else ""
            for index in range(i * asked.n, (i + 1) * asked.n):
                found.append(CompletionChoice(asked, index, i, text, texts.token_text))
        return found

    def told(self, news: News) -> News:
        """With max_tokens=0 nothing of the answer."""
        return news if self._asked.max_tokens else without_answer(news)


class ChatChoice(Choice):
    """Writes one answer.

    Args:
        asked: The request.
        index: The choice's.
        token_text: The text of a token alone.
    """

    def __init__(self, asked: ChatRequest, index: int, token_text: TokenText):
        self._asked, self._index, self._token_text = asked, index, token_text
        self._is_open = False

    def grow(self, delta: TextDelta, tally: Tally) -> list[Body]:
        """A choice with the growth; before the first, one that says whose message it is."""
        chunks = []
        if not self._is_open:
            self._is_open = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        chunk = self._chunk({"content": delta.text} if delta.text else {})
        return [*chunks, chunk | self._ending(delta)]

    def whole(self, answer: TextDelta, tally: Tally) -> Body:
        """A choice with a message."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": self._index, "message": message, **self._ending(answer)}

    def _chunk(self, delta: Body) -> Body:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _ending(self, delta: TextDelta) -> Body:
        ending = {
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._asked.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
        return ending

    def _logprobs(self, delta: TextDelta) -> Body | None:
        if self._asked.num_logprobs is None:
            return None
        return chat_logprobs(
            delta.token_ids,
            delta.logprobs or (),
            self._asked.num_logprobs,
            self._token_text,
            as_ids=self._asked.return_tokens_as_token_ids,
        )


class Chat(Generation):
    """One request of `/v1/chat/completions`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    _asked: ChatRequest

    @property
    def num_prompts(self) -> int:
        """Prompts to answer."""
        return 1

    async def requests(self) -> list[EngineRequest]:
        """One request."""
        asked, texts = self._asked, self.serving.tokenizing
        params = asked.sampling_params(asked.longest, logprobs=asked.num_logprobs)
        keep = asked.truncate_prompt_tokens
        last = texts.num_kept(asked.longest, keep)
        ids = await texts.render(asked.messages, asked.template_options, last=last)
        ids = texts.fitted(ids, "messages", asked.longest, keep)
        return [self.request(0, ids, params)]

    async def choices(self, requests: Sequence[EngineRequest]) -> list[Choice]:
        """The writers of the answers."""
        token_text = self.serving.tokenizing.token_text
        return [ChatChoice(self._asked, i, token_text) for i in range(self._asked.n)]

    def opening(self, tally: Tally) -> Body:
        """The prompt's own part of a whole answer."""
        body: Body = {}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = tally.prompts[0]
        if self._asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(tally.prompt_logprobs.get(0, [None]))
        return body
