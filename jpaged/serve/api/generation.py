"""Run one request in the engine and render its answer, whole or as a stream."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from jpaged import (
    AnswerParser,
    GrammarTrial,
    Logprob,
    SamplingParams,
    StructuredOutputs,
    TextDelta,
    reasoning_end,
)
from jpaged.serve.api.chat_events import AnswerEvents, ChatEvent
from jpaged.serve.api.fields import ChatRequest, SamplingFields
from jpaged.serve.api.response_format import tool_call_spec
from jpaged.serve.engine.client import RequestUpdate, UpdateStream, join_deltas
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import TokenizeJob
from jpaged.serve.errors import ApiError, unavailable_error
from jpaged.serve.http.exchange import DONE_EVENT, encode_json, encode_large_json
from jpaged.serve.http.serving import ServerState

JsonObject = dict[str, Any]
LogprobsByToken = Mapping[int, Logprob]
JsonEncoder = Callable[[Any], bytes]

MIN_LOGPROB = -9999.0
"""Value that replaces a log-probability of minus infinity, which JSON cannot represent."""

MAX_INLINE_LOGPROBS = 128
"""Maximum number of tokens with log-probabilities that the event loop encodes itself."""

_MAX_INLINE_TOKENS = 64 * 1024
"""Maximum number of tokens without log-probabilities that the event loop encodes itself."""


class Generation(ABC):
    """Runs one request in the engine and yields its answer in the format of an API.

    A request asks for `n` answers to each prompt. Answers are numbered across all prompts: answer
    `number` belongs to prompt `number // n`.

    Args:
        serving: The state of the server.
        api_request: The fields of the request.
        request_id: Id of the answer. The ids of the engine's requests begin with this id.
        model: Name of the model in the answer.
        client: Identifier of the client, as `client_id` returns it.
    """

    def __init__(
        self,
        serving: ServerState,
        api_request: SamplingFields,
        request_id: str,
        model: str,
        client: str,
    ):
        self._serving, self._tokenizing = serving, serving.tokenizing
        self._api_request, self._client = api_request, client
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._prompts: list[list[int]] = []
        # Log-probabilities of the tokens of each prompt, by the prompt's index. The engine sends
        # them before the answers.
        self._prompt_logprobs: dict[int, list[LogprobsByToken | None]] = {}
        self._num_cached_tokens: dict[int, int] = {}  # by the prompt's index
        self._num_output_tokens = 0
        self._finished_answers: set[int] = set()  # indices of the finished answers

    @abstractmethod
    async def _make_engine_requests(self) -> list[EngineRequest]:
        """Return the engine's requests, one per prompt.

        Raises:
            ApiError: A prompt or a parameter is invalid.
        """

    @abstractmethod
    def _encode_events(self, updates: list[RequestUpdate], encode: JsonEncoder) -> bytes:
        """Return a stream's events for updates from the engine."""

    @abstractmethod
    def _encode_last_events(self) -> bytes:
        """Return the events that end a stream."""

    @abstractmethod
    def _answer_body(self, answers: list[list[TextDelta]]) -> JsonObject:
        """Return the JSON body of a response that is not streamed.

        `answers` has a list of deltas for each answer in the response.
        """

    def _process_delta(self, number: int, delta: TextDelta) -> None:
        """Process one delta of an answer that is not streamed, as soon as the delta arrives."""
        return

    def _visible_delta(self, delta: TextDelta) -> TextDelta:
        """Return the part of a delta that the client may see."""
        return delta

    def _is_large(self, updates: list[RequestUpdate]) -> bool:
        """Return whether to encode the events of these updates in a separate thread."""
        return False

    async def iter_body(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer: one JSON body, or the events of a stream.

        Raises:
            ApiError: The request is invalid or failed.
        """
        api_request, serving = self._api_request, self._serving
        with serving.admit(self._client, api_request.num_sequences):
            try:
                async with asyncio.timeout(serving.config.limits.queue_timeout):
                    requests = await self._make_engine_requests()
            except TimeoutError:
                raise unavailable_error(
                    "aborted: the request waited too long for its turn"
                ) from None
            self._prompts = [request.prompt_token_ids for request in requests]
            try:
                async with serving.run(requests) as run:
                    if not api_request.stream:
                        yield await self._collect_answer(run)
                        return
                    async for updates in run:
                        if self._is_large(updates):
                            yield await serving.run_in_thread(
                                partial(self._encode_events, updates, encode_large_json)
                            )
                        elif events := self._encode_events(updates, encode_json):
                            yield events
            except ApiError as error:
                raise self._with_request_path(error) from None
            yield self._encode_last_events()

    @property
    def _spec_path(self) -> str:
        """Path of the structured-output spec in the request, for errors."""
        return self._api_request.spec_path

    def _with_request_path(self, error: ApiError) -> ApiError:
        """Return the error with the path of the request's field in place of the engine's field.

        The engine's errors name fields of `StructuredOutputs`. Replace these names by `_spec_path`.
        """
        names = (f"structured_outputs.{kind}" for kind in StructuredOutputs.KINDS)
        return error.with_renamed_fields(dict.fromkeys(names, self._spec_path))

    def _make_engine_request(
        self, index: int, token_ids: list[int], params: SamplingParams
    ) -> EngineRequest:
        """Return the engine's request for the prompt number `index`."""
        api_request = self._api_request
        salt = self._serving.cache_salt(self._client, api_request.cache_salt)
        return EngineRequest(f"{self._id}-{index}", token_ids, params, api_request.priority, salt)

    def _process_update(self, update: RequestUpdate) -> list[tuple[int, TextDelta]]:
        """Count the tokens of an update, and return each delta with the number of its answer.

        If the engine aborted the request, add a last delta for each answer that has not finished.
        """
        index, delta = update
        self._num_cached_tokens[index] = delta.num_cached_tokens or self._num_cached_tokens.get(
            index, 0
        )
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(index, []).extend(delta.prompt_logprobs)
        first = index * self._api_request.n
        deltas = [(first + each.index, self._visible_delta(each)) for each in delta.deltas]
        self._num_output_tokens += sum(len(each.token_ids) for _, each in deltas)
        finished = {number for number, each in deltas if each.finished}
        self._finished_answers |= finished
        # Every finished request has metrics, unless the engine aborted the request.
        if delta.finished and (not finished or delta.metrics is None):
            rest = {*range(first, first + self._api_request.n)} - self._finished_answers
            deltas += [(number, TextDelta("", finish_reason="abort")) for number in sorted(rest)]
        return deltas

    def _usage(self) -> JsonObject:
        """Return OpenAI's `usage` object, which has the token counts."""
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "completion_tokens": self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }

    async def _collect_answer(self, run: UpdateStream) -> bytes:
        answers: list[list[TextDelta]] = [
            [] for _ in range(len(self._prompts) * self._api_request.n)
        ]
        async for updates in run:
            for each in updates:
                for number, delta in self._process_update(each):
                    self._process_delta(number, delta)
                    answers[number].append(delta)
        has_scores = self._prompt_logprobs or any(each.logprobs for own in answers for each in own)
        if self._usage()["total_tokens"] <= (
            MAX_INLINE_LOGPROBS if has_scores else _MAX_INLINE_TOKENS
        ):
            return encode_json(self._answer_body(answers))
        return await self._serving.run_in_thread(
            lambda: encode_large_json(self._answer_body(answers))
        )


class ChoicesGeneration(Generation):
    """A generation with `choices`, the format of OpenAI's Completions and Chat APIs.

    Attributes:
        whole_object: Value of `object` in a whole answer.
        chunk_object: Value of `object` in a chunk of a stream.
    """

    whole_object: str
    chunk_object: str

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._event_start: bytes | None = None
        self._started_answers: set[int] = set()  # indices of answers whose first delta was encoded

    @abstractmethod
    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[JsonObject]:
        """Return the choices that a stream sends for a delta, each in a separate chunk."""

    @abstractmethod
    def _choice(self, number: int, answer: TextDelta) -> JsonObject:
        """Return the choice that contains a whole answer."""

    def _extra_body_fields(self) -> JsonObject:
        """Return the additional fields of a body that contains whole answers."""
        return {}

    @override
    def _is_large(self, updates: list[RequestUpdate]) -> bool:
        """Return whether to encode these updates in a separate thread.

        Only updates with many log-probabilities are encoded in a thread. Many log-probabilities
        collect when a slow client does not read for some time.
        """
        deltas = (own for _, delta in updates for own in delta.deltas)
        return sum(len(own.logprobs or ()) for own in deltas) > 8 * MAX_INLINE_LOGPROBS

    @override
    def _encode_events(self, updates: list[RequestUpdate], encode: JsonEncoder) -> bytes:
        events, with_usage = [], self._api_request.effective_stream_options.continuous_usage_stats
        for each in updates:
            for number, delta in self._process_update(each):
                is_first = number not in self._started_answers
                self._started_answers.add(number)
                for choice in self._chunks(number, delta, is_first=is_first):
                    usage = self._usage() if with_usage else None
                    events.append(self._encode_chunk([choice], encode, usage))
        return b"".join(events)

    @override
    def _encode_last_events(self) -> bytes:
        if not self._api_request.effective_stream_options.include_usage:
            return DONE_EVENT
        return self._encode_chunk([], encode_json, self._usage()) + DONE_EVENT

    def _encode_chunk(
        self, choices: list[JsonObject], encode: JsonEncoder, usage: JsonObject | None = None
    ) -> bytes:
        """Return a chunk as an event. The fields that all chunks share are encoded only once."""
        if self._event_start is None:
            self._event_start = b"data: " + encode_json(self._common_fields(self.chunk_object))[:-1]
        tail = b"}\n\n" if usage is None else b',"usage":%b}\n\n' % encode_json(usage)
        return b'%b,"choices":%b%b' % (self._event_start, encode(choices), tail)

    @override
    def _answer_body(self, answers: list[list[TextDelta]]) -> JsonObject:
        choices = [self._choice(number, join_deltas(own)) for number, own in enumerate(answers)]
        body = self._common_fields(self.whole_object) | self._extra_body_fields()
        return body | {"choices": choices, "usage": self._usage()}

    def _common_fields(self, kind: str) -> JsonObject:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _finish_fields(self, delta: TextDelta) -> JsonObject:
        """Return the fields that say why an answer ended. If the request asks for token ids, also
        return the ids and the versions of the weights that made the tokens."""
        ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._api_request.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
            ending["weight_versions"] = delta.weight_versions
        return ending

    def _format_token(self, token_id: int) -> str:
        """Return a token's text for `logprobs`, or its id if the request asks for ids."""
        as_id = self._api_request.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else self._tokenizing.token_text(token_id)

    def _format_prompt_logprobs(self, index: int) -> list[Any]:
        """Return vLLM's `prompt_logprobs`: a dict of candidates per prompt token, or None."""
        return [
            candidates
            and {
                str(token_id): {
                    "logprob": clamp_logprob(own.logprob),
                    "rank": own.rank,
                    "decoded_token": own.decoded_token,
                }
                for token_id, own in candidates.items()
            }
            for candidates in self._prompt_logprobs.get(index, [None])
        ]


class ChatGeneration(Generation):
    """A generation that answers a conversation. Subclasses render the chat events."""

    keeps_streamed_text = False
    """Whether items of a streamed answer keep their text after it has been sent."""

    _api_request: ChatRequest

    def __init__(self, *args: Any):
        super().__init__(*args)
        config, tools = self._serving.config, self._api_request.offered_tools
        self._has_reasoning = config.reasoning_parser is not None
        self._is_parsed = self._has_reasoning or bool(tools)
        self._answers: dict[int, AnswerEvents] = {}  # by the answer's number

    @override
    async def _make_engine_requests(self) -> list[EngineRequest]:
        api_request = self._api_request
        # Keep special tokens in the text, because tags of reasoning and tool calls may be special
        # tokens.
        others = {"skip_special_tokens": False} if self._is_parsed else {}
        params = api_request.sampling_params(
            api_request.max_answer_tokens, logprobs=api_request.num_logprobs, **others
        )
        job = TokenizeJob(
            messages=api_request.template_messages, options=api_request.template_options
        )
        keep = api_request.truncate_prompt_tokens
        ids = await self._tokenizing.prompt_ids(
            job, "messages", api_request.max_answer_tokens, keep
        )
        spec = await self._make_spec(self._tokenizing.text_end(ids))
        return [self._make_engine_request(0, ids, replace(params, structured_outputs=spec))]

    @property
    def _has_call_grammar(self) -> bool:
        """Whether a grammar constrains the tool calls of the answer."""
        return (
            self._api_request.has_call_grammar and self._serving.config.tool_call_parser is not None
        )

    @property
    @override
    def _spec_path(self) -> str:
        return "tools" if self._has_call_grammar else self._api_request.spec_path

    async def _make_spec(self, prompt_end: str) -> StructuredOutputs | None:
        """Return the structured-output spec of the answer after its reasoning, or None."""
        api_request, config = self._api_request, self._serving.config
        spec = api_request.spec
        if self._has_call_grammar and config.tool_call_parser is not None:
            make = partial(
                tool_call_spec,
                config.tool_call_parser,
                api_request.offered_tools,
                api_request.tool_choice,
                spec,
                parallel=api_request.parallel_tool_calls,
                special_ids=self._tokenizing.special_ids,
            )
            spec = await self._serving.run_in_thread(make)
            await self._check_call_grammar(spec)
        elif spec is not None:
            await self._tokenizing.check_spec(spec, api_request.spec_path, self._client)
        if spec is not None and config.reasoning_parser is not None:
            spec = spec.with_reasoning(*reasoning_end(config.reasoning_parser, prompt_end))
        return spec

    async def _check_call_grammar(self, spec: StructuredOutputs) -> None:
        """Raise ApiError if the grammar of an answer with tool calls does not compile.

        To find the cause, compile each schema within the grammar separately. The time limit for all
        schemas together is `GrammarTrial.seconds`. The error names the first schema that fails. If
        no schema fails in this time, the error names `tools`.
        """
        try:
            await self._tokenizing.check_spec(spec, "tools", self._client)
        except ApiError as error:
            if error.status != 400:
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(GrammarTrial.seconds):
                    for path, own in self._api_request.part_specs():
                        await self._tokenizing.check_spec(own, path, self._client)
            raise

    def _answer_events(self, number: int) -> AnswerEvents:
        """Return the `AnswerEvents` of an answer, and create it if it does not exist yet."""
        found = self._answers.get(number)
        if found is None:
            api_request, config, parser = self._api_request, self._serving.config, None
            if self._is_parsed:
                parser = AnswerParser(
                    reasoning=config.reasoning_parser,
                    tool_calls=config.tool_call_parser if api_request.offered_tools else None,
                    tools=[tool.template_dict for tool in api_request.offered_tools],
                    prompt_end=self._tokenizing.text_end(self._prompts[0]),
                    parallel=api_request.parallel_tool_calls,
                )
            keeps_text = self.keeps_streamed_text or not api_request.stream
            found = self._answers[number] = AnswerEvents(parser, keeps_text=keeps_text)
        return found

    @override
    def _process_delta(self, number: int, delta: TextDelta) -> None:
        self._answer_events(number).add(delta)

    def _chat_events(self, updates: list[RequestUpdate]) -> list[ChatEvent]:
        """Return the chat events for updates from the engine."""
        deltas = [each for update in updates for each in self._process_update(update)]
        return [
            event for number, delta in deltas for event in self._answer_events(number).add(delta)
        ]


def clamp_logprob(logprob: float) -> float:
    """Return the log-probability, or `MIN_LOGPROB` if it is lower."""
    return max(logprob, MIN_LOGPROB)
