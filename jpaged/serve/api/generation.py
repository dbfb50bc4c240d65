"""Generation: one request, from its prompts to the answer that is sent, whole or as a stream."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jpaged import (
    AnswerParser,
    GrammarTrial,
    Logprob,
    SamplingParams,
    StructuredOutputs,
    TextDelta,
    reasoning_end,
)
from jpaged.serve.api.chat_events import AnswerEvents, Event
from jpaged.serve.api.fields import ChatRequest, SamplingFields
from jpaged.serve.api.response_format import form_of_calls
from jpaged.serve.engine.client import News, Run, joined
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import Order
from jpaged.serve.errors import ApiError, not_serving
from jpaged.serve.http.exchange import DONE, json_bytes, large_json
from jpaged.serve.http.serving import Serving

Json = dict[str, Any]
Candidates = Mapping[int, Logprob]
Encode = Callable[[Any], bytes]

LOWEST = -9999.0
"""Written for the logarithm of 0, which JSON has no number for."""

MANY_TOKENS = 128
"""Maximum number of tokens with up to 20 candidates each that the event loop encodes itself."""

_VERY_MANY_TOKENS = 64 * 1024
"""Maximum number of tokens without candidates that the event loop encodes itself."""


class Generation(ABC):
    """Runs one request in the engine and yields its answer in the format of an API.

    A request asks for `n` answers to each prompt. Answers are numbered across all prompts: answer
    `number` belongs to prompt `number // n`.

    Args:
        serving: The server.
        asked: The fields that every API has.
        request_id: The id of the answer. The engine's requests derive their ids from it.
        model: The model's name as the client wrote it.
        client: The client's API key or address.
    """

    def __init__(
        self, serving: Serving, asked: SamplingFields, request_id: str, model: str, client: str
    ):
        self._serving, self._texts = serving, serving.tokenizing
        self._asked, self._client = asked, client
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._prompts: list[list[int]] = []
        # By prompt. All log-probabilities of a prompt arrive before its answers begin.
        self._prompt_logprobs: dict[int, list[Candidates | None]] = {}
        self._num_cached: dict[int, int] = {}  # by prompt
        self._num_output_tokens = 0
        self._finished: set[int] = set()  # numbers of answers

    @abstractmethod
    async def _requests(self) -> list[EngineRequest]:
        """Return the engine's requests, one per prompt.

        Raises:
            ApiError: a prompt or a parameter is not acceptable.
        """

    @abstractmethod
    def _events(self, news: list[News], encode: Encode) -> bytes:
        """Return the events of a stream for the engine's news."""

    @abstractmethod
    def _last_events(self) -> bytes:
        """Return the events that end a stream."""

    @abstractmethod
    def _body(self, answers: list[list[TextDelta]]) -> Json:
        """Return the body of a whole answer, given the deltas of each answer."""

    def _read(self, number: int, delta: TextDelta) -> None:
        """Process a delta of an answer that is not streamed, as soon as the delta arrives."""
        return

    def _visible(self, delta: TextDelta) -> TextDelta:
        """Return the part of a delta that the client may see."""
        return delta

    def _is_large(self, news: list[News]) -> bool:
        """Whether a thread should encode the events of this news."""
        return False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer: one JSON body, or the events of a stream.

        Raises:
            ApiError: the request is not acceptable, or failed.
        """
        asked, serving = self._asked, self._serving
        with serving.admit(self._client, asked.num_sequences):
            try:
                async with asyncio.timeout(serving.config.limits.queue_timeout):
                    requests = await self._requests()
            except TimeoutError:
                raise not_serving("aborted: the request waited too long for its turn") from None
            self._prompts = [request.prompt_token_ids for request in requests]
            try:
                async with serving.run(requests) as run:
                    if not asked.stream:
                        yield await self._whole(run)
                        return
                    async for news in run:
                        if self._is_large(news):
                            yield await serving.in_thread(partial(self._events, news, large_json))
                        elif events := self._events(news, json_bytes):
                            yield events
            except ApiError as error:
                raise self._with_request_path(error) from None
            yield self._last_events()

    @property
    def _form_path(self) -> str:
        """The path of the request's structured-output specification, for errors."""
        return self._asked.form_path

    def _with_request_path(self, error: ApiError) -> ApiError:
        """Replace the engine's path of the structured-output specification by `_form_path`."""
        names = (f"structured_outputs.{kind}" for kind in StructuredOutputs.KINDS)
        return error.renamed(dict.fromkeys(names, self._form_path))

    def _request(self, index: int, token_ids: list[int], params: SamplingParams) -> EngineRequest:
        """Return the engine's request for one prompt."""
        asked = self._asked
        salt = self._serving.cache_salt(self._client, asked.cache_salt)
        return EngineRequest(f"{self._id}-{index}", token_ids, params, asked.priority, salt)

    def _take(self, news: News) -> list[tuple[int, TextDelta]]:
        """Count the tokens of a request's news; return each delta with its answer's number.

        If the request was cut short, add a last delta for each answer that has not finished.
        """
        index, delta = news
        self._num_cached[index] = delta.num_cached_tokens or self._num_cached.get(index, 0)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(index, []).extend(delta.prompt_logprobs)
        first = index * self._asked.n
        grown = [(first + each.index, self._visible(each)) for each in delta.deltas]
        self._num_output_tokens += sum(len(each.token_ids) for _, each in grown)
        finished = {number for number, each in grown if each.finished}
        self._finished |= finished
        # Only a request that was cut short finishes without metrics.
        if delta.finished and (not finished or delta.metrics is None):
            rest = {*range(first, first + self._asked.n)} - self._finished
            grown += [(number, TextDelta("", finish_reason="abort")) for number in sorted(rest)]
        return grown

    def _usage(self) -> Json:
        """Return the token counts under OpenAI's names."""
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "completion_tokens": self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }

    async def _whole(self, run: Run) -> bytes:
        answers: list[list[TextDelta]] = [[] for _ in range(len(self._prompts) * self._asked.n)]
        async for news in run:
            for each in news:
                for number, delta in self._take(each):
                    self._read(number, delta)
                    answers[number].append(delta)
        has_scores = self._prompt_logprobs or any(each.logprobs for own in answers for each in own)
        if self._usage()["total_tokens"] <= (MANY_TOKENS if has_scores else _VERY_MANY_TOKENS):
            return json_bytes(self._body(answers))
        return await self._serving.in_thread(lambda: large_json(self._body(answers)))


class ChoicesGeneration(Generation):
    """A generation in OpenAI's older format: `choices` in one body or in the chunks of a stream."""

    whole_object: str
    chunk_object: str

    def __init__(self, *about: Any):
        super().__init__(*about)
        self._event_start: bytes | None = None
        self._begun: set[int] = set()  # numbers of answers

    @abstractmethod
    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[Json]:
        """Return the choices that a stream sends for a delta of an answer, one per chunk."""

    @abstractmethod
    def _choice(self, number: int, answer: TextDelta) -> Json:
        """Return the choice of a whole answer."""

    def _whole_fields(self) -> Json:
        """Return fields that only the body of a whole answer has, besides its choices."""
        return {}

    def _is_large(self, news: list[News]) -> bool:
        """Whether many tokens with candidates arrived together, because the client reads slowly."""
        grown = (own for _, delta in news for own in delta.deltas)
        return sum(len(own.logprobs or ()) for own in grown) > 8 * MANY_TOKENS

    def _events(self, news: list[News], encode: Encode) -> bytes:
        events, with_usage = [], self._asked.options.continuous_usage_stats
        for each in news:
            for number, delta in self._take(each):
                is_first = number not in self._begun
                self._begun.add(number)
                for choice in self._chunks(number, delta, is_first=is_first):
                    usage = self._usage() if with_usage else None
                    events.append(self._event([choice], encode, usage))
        return b"".join(events)

    def _last_events(self) -> bytes:
        if not self._asked.options.include_usage:
            return DONE
        return self._event([], json_bytes, self._usage()) + DONE

    def _event(self, choices: list[Json], encode: Encode, usage: Json | None = None) -> bytes:
        """Return a chunk as an event. The fields common to all chunks are encoded once."""
        if self._event_start is None:
            self._event_start = b"data: " + json_bytes(self._head(self.chunk_object))[:-1]
        tail = b"}\n\n" if usage is None else b',"usage":%b}\n\n' % json_bytes(usage)
        return b'%b,"choices":%b%b' % (self._event_start, encode(choices), tail)

    def _body(self, answers: list[list[TextDelta]]) -> Json:
        choices = [self._choice(number, joined(own)) for number, own in enumerate(answers)]
        body = self._head(self.whole_object) | self._whole_fields()
        return body | {"choices": choices, "usage": self._usage()}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _ending(self, delta: TextDelta) -> Json:
        """Return the last fields of a choice, which both APIs have."""
        ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._asked.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
        return ending

    def _shown(self, token_id: int) -> str:
        """Return a token in log-probabilities: its text, or its id if the request asks for ids."""
        as_id = self._asked.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else self._texts.token_text(token_id)

    def _shown_prompt_logprobs(self, index: int) -> list[Any]:
        """Return vLLM's `prompt_logprobs`: each token's candidates by id, None for the first."""
        return [
            found
            and {
                str(token_id): {
                    "logprob": finite(own.logprob),
                    "rank": own.rank,
                    "decoded_token": own.decoded_token,
                }
                for token_id, own in found.items()
            }
            for found in self._prompt_logprobs.get(index, [None])
        ]


class ChatGeneration(Generation):
    """A generation that answers a conversation. Subclasses render its events."""

    keeps_streamed_text = False
    """Whether a stream needs the text of items again after it has sent that text."""

    _asked: ChatRequest

    def __init__(self, *about: Any):
        super().__init__(*about)
        config, tools = self._serving.config, self._asked.offered_tools
        self._has_reasoning = config.reasoning_parser is not None
        self._is_parsed = self._has_reasoning or bool(tools)
        self._answers: dict[int, AnswerEvents] = {}  # by the answer's number

    async def _requests(self) -> list[EngineRequest]:
        asked = self._asked
        # The tags of reasoning and calls may be special tokens.
        others = {"skip_special_tokens": False} if self._is_parsed else {}
        params = asked.sampling_params(asked.longest, logprobs=asked.num_logprobs, **others)
        order = Order(messages=asked.conversation, options=asked.template_options)
        keep = asked.truncate_prompt_tokens
        ids = await self._texts.prompt_ids(order, "messages", asked.longest, keep)
        form = await self._form(self._texts.text_end(ids))
        return [self._request(0, ids, replace(params, structured_outputs=form))]

    @property
    def _holds_calls(self) -> bool:
        """Whether a grammar constrains the calls of the answer."""
        return self._asked.holds_calls and self._serving.config.tool_call_parser is not None

    @property
    def _form_path(self) -> str:
        return "tools" if self._holds_calls else self._asked.form_path

    async def _form(self, prompt_end: str) -> StructuredOutputs | None:
        """Return the structured-output specification of what follows the reasoning."""
        asked, config = self._asked, self._serving.config
        form = asked.form
        if self._holds_calls and config.tool_call_parser is not None:
            make = partial(
                form_of_calls,
                config.tool_call_parser,
                asked.offered_tools,
                asked.tool_choice,
                form,
                parallel=asked.parallel_tool_calls,
                special_ids=self._texts.special_ids,
            )
            form = await self._serving.in_thread(make)
            await self._check_calls(form)
        elif form is not None:
            await self._texts.check_form(form, asked.form_path, self._client)
        if form is not None and config.reasoning_parser is not None:
            form = form.behind(*reasoning_end(config.reasoning_parser, prompt_end))
        return form

    async def _check_calls(self, form: StructuredOutputs) -> None:
        """Raise ApiError unless the grammar of an answer with tool calls compiles.

        If it does not, compile each of its schemas alone, for at most `GrammarTrial.seconds`. The
        error names the first schema that fails, else `tools`.
        """
        try:
            await self._texts.check_form(form, "tools", self._client)
        except ApiError as error:
            if error.status != 400:
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(GrammarTrial.seconds):
                    for path, own in self._asked.forms_within():
                        await self._texts.check_form(own, path, self._client)
            raise

    def _answer(self, number: int) -> AnswerEvents:
        """Return what makes the events of an answer."""
        found = self._answers.get(number)
        if found is None:
            asked, config, parser = self._asked, self._serving.config, None
            if self._is_parsed:
                parser = AnswerParser(
                    reasoning=config.reasoning_parser,
                    tool_calls=config.tool_call_parser if asked.offered_tools else None,
                    tools=[tool.told for tool in asked.offered_tools],
                    prompt_end=self._texts.text_end(self._prompts[0]),
                    parallel=asked.parallel_tool_calls,
                )
            keeps_text = self.keeps_streamed_text or not asked.stream
            found = self._answers[number] = AnswerEvents(parser, keeps_text=keeps_text)
        return found

    def _read(self, number: int, delta: TextDelta) -> None:
        self._answer(number).add(delta)

    def _chat_events(self, news: list[News]) -> list[Event]:
        """Return the events of the engine's news."""
        grown = [each for update in news for each in self._take(update)]
        return [event for number, delta in grown for event in self._answer(number).add(delta)]


def finite(logprob: float) -> float:
    """Return the logarithm as a number that JSON can write."""
    return max(logprob, LOWEST)
