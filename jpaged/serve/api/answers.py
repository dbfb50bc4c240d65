"""From a request for completions or a chat to its answer, whole or as it grows."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
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
from jpaged.serve.api.fields import ChatRequest, CompletionRequest, SamplingFields
from jpaged.serve.api.parts import AnswerParts
from jpaged.serve.api.response_format import form_of_calls
from jpaged.serve.engine.client import News, Run, joined
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import Order
from jpaged.serve.errors import ApiError, not_serving
from jpaged.serve.http.exchange import DONE, json_bytes, large_json
from jpaged.serve.http.serving import Serving

Body = dict[str, Any]
Candidates = Mapping[int, Logprob]
Encode = Callable[[Any], bytes]

LOWEST = -9999.0
"""Stands for a probability of 0, whose logarithm JSON cannot write."""

MANY_TOKENS = 128
"""Tokens with candidates, up to twenty each, above which an answer is encoded in a thread."""

_VERY_MANY_TOKENS = 64 * 1024
"""Tokens without candidates above which an answer is encoded in a thread."""


class Generation(ABC):
    """A request for answers, `n` to each of its prompts; an answer's place is its number among all.

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
        self._serving, self._texts = serving, serving.tokenizing
        self._asked, self._client = asked, client
        self._head = {"id": request_id, "object": "", "created": int(time.time()), "model": model}
        self._event_start: bytes | None = None
        self._prompts: list[list[int]] = []
        # By the prompt's number, where they were asked for, as far as they have come: all before
        # the first of the answer.
        self._prompt_logprobs: dict[int, list[Candidates | None]] = {}
        self._num_cached: dict[int, int] = {}  # by the prompt's number
        self._num_output_tokens = 0
        self._begun: set[int] = set()  # places of answers of which something was told
        self._ended: set[int] = set()

    @abstractmethod
    async def _requests(self) -> list[EngineRequest]:
        """What to ask of the engine, one request a prompt.

        Raises:
            ApiError: a prompt or a parameter is not acceptable.
        """

    @abstractmethod
    def _chunks(self, place: int, delta: TextDelta, *, is_first: bool) -> list[Body]:
        """What a stream says of an answer's growth: a choice for each of its chunks."""

    @abstractmethod
    def _choice(self, place: int, answer: TextDelta) -> Body:
        """The choice of an answer that is not streamed."""

    @property
    def _tells_prompts(self) -> bool:
        """Whether an answer in a stream begins with the log-probabilities of its prompt."""
        return False

    def _told(self, delta: TextDelta) -> TextDelta:
        """An answer's growth as far as it is told of."""
        return delta

    def _read(self, place: int, delta: TextDelta) -> None:
        """Look at what an answer that is not streamed grew by, as it comes."""
        return

    def _opening(self) -> Body:
        """The fields of a whole answer that are not its choices."""
        return {}

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer: one piece of JSON, or events.

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
                        if self._tells_a_long_prompt(news) or _tells_many(news):
                            yield await serving.in_thread(partial(self._events, news, large_json))
                        elif events := self._events(news, json_bytes):
                            yield events
            except ApiError as error:
                raise self._in_words_of_the_request(error) from None
            yield self._last_events()

    @property
    def _form_path(self) -> str:
        """The field that says what answers obey."""
        return self._asked.form_path

    def _in_words_of_the_request(self, error: ApiError) -> ApiError:
        """Return the engine's error with the request's name for the field that answers obey."""
        form = self._asked.form
        return error.renamed({f"structured_outputs.{form.kind}": self._form_path} if form else {})

    def _request(self, index: int, token_ids: list[int], params: SamplingParams) -> EngineRequest:
        """The request of one prompt."""
        asked = self._asked
        salt = self._serving.cache_salt(self._client, asked.cache_salt)
        return EngineRequest(f"{self._head['id']}-{index}", token_ids, params, asked.priority, salt)

    def _take(self, news: News) -> list[tuple[int, TextDelta]]:
        """Count news; gives what answers grew by, each with its place.

        If the request was cut short the last deltas are made here, so that each answer ends.
        """
        index, delta = news
        self._num_cached[index] = delta.num_cached_tokens or self._num_cached.get(index, 0)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(index, []).extend(delta.prompt_logprobs)
        first = index * self._asked.n
        grown = [(first + each.index, self._told(each)) for each in delta.deltas]
        self._num_output_tokens += sum(len(each.token_ids) for _, each in grown)
        ended = {place for place, each in grown if each.finished}
        self._ended |= ended
        if delta.finished and (not ended or delta.metrics is None):  # None: it was cut short
            rest = {*range(first, first + self._asked.n)} - self._ended
            grown += [(place, TextDelta("", finish_reason="abort")) for place in sorted(rest)]
        return grown

    def _usage(self) -> Body:
        """The token counts, as OpenAI names them."""
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
                for place, delta in self._take(each):
                    self._read(place, delta)
                    answers[place].append(delta)
        usage, write = self._usage(), self._body(answers)
        has_scores = self._prompt_logprobs or any(each.logprobs for own in answers for each in own)
        if usage["total_tokens"] <= (MANY_TOKENS if has_scores else _VERY_MANY_TOKENS):
            return write(json_bytes)
        return await self._serving.in_thread(partial(write, large_json))

    def _body(self, answers: list[list[TextDelta]]) -> Callable[[Encode], bytes]:
        """Writes the whole of an answer that is not streamed, of what each answer grew by."""
        usage = self._usage()

        def write(encode: Encode) -> bytes:
            choices = [self._choice(place, joined(own)) for place, own in enumerate(answers)]
            body = self._head | {"object": self.whole_object} | self._opening()
            return encode(body | {"choices": choices, "usage": usage})

        return write

    def _last_events(self) -> bytes:
        """What ends a stream."""
        if not self._asked.options.include_usage:
            return DONE
        return self._event([], json_bytes, self._usage()) + DONE

    def _tells_a_long_prompt(self, news: list[News]) -> bool:
        """Whether an answer begins, and with it the log-probabilities of a long prompt are told."""
        return self._tells_prompts and any(
            len(self._prompts[index]) > MANY_TOKENS
            and any(index * self._asked.n + own.index not in self._begun for own in delta.deltas)
            for index, delta in news
        )

    def _events(self, news: list[News], encode: Encode) -> bytes:
        """What a stream says of news."""
        events, with_usage = [], self._asked.options.continuous_usage_stats
        for each in news:
            for place, delta in self._take(each):
                is_first = place not in self._begun
                self._begun.add(place)
                for choice in self._chunks(place, delta, is_first=is_first):
                    usage = self._usage() if with_usage else None
                    events.append(self._event([choice], encode, usage))
        return b"".join(events)

    def _event(self, choices: list[Body], encode: Encode, usage: Body | None = None) -> bytes:
        """A chunk as an event. What all chunks of a stream have is made JSON once."""
        if self._event_start is None:
            head = self._head | {"object": self.chunk_object}
            self._event_start = b"data: " + json_bytes(head)[:-1]
        tail = b"}\n\n" if usage is None else b',"usage":%b}\n\n' % json_bytes(usage)
        return b'%b,"choices":%b%b' % (self._event_start, encode(choices), tail)

    def _ending(self, delta: TextDelta) -> Body:
        """The fields of a choice that all have."""
        ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._asked.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
        return ending


class Completion(Generation):
    """One request of `/v1/completions`."""

    whole_object = chunk_object = "text_completion"
    _asked: CompletionRequest

    async def _requests(self) -> list[EngineRequest]:
        """One a prompt. A prompt that is only scored is so with the first token after it."""
        asked, texts = self._asked, self._texts
        scored = asked.logprobs if asked.echo else None
        scored = asked.prompt_logprobs if scored is None else scored
        params = asked.sampling_params(
            max(asked.max_tokens, 1), logprobs=asked.logprobs, prompt_logprobs=scored
        )
        if asked.form is not None:
            await texts.check_form(asked.form, asked.form_path, self._client)
        requests = []
        for i, prompt in enumerate(asked.prompts):
            path = f"prompt[{i}]" if len(asked.prompts) > 1 else "prompt"
            if isinstance(prompt, str):
                prompt = Order(prompt, asked.add_special_tokens)
            ids = await texts.prompt_ids(
                prompt, path, asked.max_tokens, asked.truncate_prompt_tokens
            )
            requests.append(self._request(i, ids, params))
        if asked.echo:
            are_whole = asked.truncate_prompt_tokens is None
            self._echoed = [
                prompt
                if isinstance(prompt, str) and are_whole
                else await texts.decode(each.prompt_token_ids)
                for prompt, each in zip(asked.prompts, requests, strict=True)
            ]
        self._num_characters = [0] * (len(requests) * asked.n)  # of which logprobs were told
        return requests

    @property
    def _tells_prompts(self) -> bool:
        return self._asked.echo and self._asked.logprobs is not None

    def _told(self, delta: TextDelta) -> TextDelta:
        """With max_tokens=0 the prompt is only scored: the answer has no tokens."""
        if self._asked.max_tokens:
            return delta
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        scores = delta.logprobs and []
        return replace(
            delta, text="", token_ids=(), logprobs=scores, finish_reason=reason, stop_reason=None
        )

    def _chunks(self, place: int, delta: TextDelta, *, is_first: bool) -> list[Body]:
        """One choice; the first has the prompt, if that is asked."""
        index, with_prompt = place // self._asked.n, is_first and self._asked.echo
        choice = {
            "index": place,
            "text": (self._echoed[index] if with_prompt else "") + delta.text,
            "logprobs": self._logprobs(place, delta, with_prompt=with_prompt),
            **self._ending(delta),
        }
        if is_first and self._asked.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[index]
        return [choice]

    def _choice(self, place: int, answer: TextDelta) -> Body:
        """As the only chunk of a stream, and the prompt's candidates."""
        (choice,) = self._chunks(place, answer, is_first=True)
        if self._asked.prompt_logprobs is not None:
            found = self._prompt_logprobs.get(place // self._asked.n, [None])
            choice["prompt_logprobs"] = prompt_logprobs(found)
        return choice

    def _logprobs(self, place: int, delta: TextDelta, *, with_prompt: bool) -> Body | None:
        """Of the next tokens; the first token of a text has no candidates."""
        if self._asked.logprobs is None:
            return None
        ids: Sequence[int] = delta.token_ids
        candidates: Sequence[Candidates | None] = delta.logprobs or ()
        width, starts = self._texts.num_characters, list[int]()
        if with_prompt:
            index = place // self._asked.n
            prompt, scores = self._prompts[index], self._prompt_logprobs.get(index, [])
            # A request that was cut short may have no more of them.
            scores = [*scores, *[None] * (len(prompt) - len(scores))]
            ids, candidates = [*prompt, *ids], [*scores, *candidates]
            # What the tokenizer puts before a prompt is a token, and no part of its text.
            length = len(self._echoed[index])
            before = min(length - sum(map(width, prompt)), 0)
            *starts, _ = accumulate(map(width, prompt), initial=before)
            self._num_characters[place] = length
        offset = self._num_characters[place]
        widths = map(width, delta.token_ids)
        *offsets, self._num_characters[place] = accumulate(widths, initial=offset)
        found = list(zip(ids, candidates, strict=True))
        return {
            "text_offset": [max(start, 0) for start in starts] + offsets,
            "token_logprobs": [None if c is None else finite(c[t].logprob) for t, c in found],
            "tokens": [self._shown(token_id) for token_id in ids],
            "top_logprobs": [None if c is None else self._top(c) for c in candidates],
        }

    def _top(self, candidates: Candidates) -> dict[str, float]:
        """By text; of several tokens with one text the likeliest."""
        top: dict[str, float] = {}
        for token_id, found in candidates.items():
            text, logprob = self._shown(token_id), finite(found.logprob)
            top[text] = max(logprob, top.get(text, LOWEST))
        return top

    def _shown(self, token_id: int) -> str:
        as_id = self._asked.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else self._texts.token_text(token_id)


class Chat(Generation):
    """One request of `/v1/chat/completions`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    _asked: ChatRequest

    def __init__(self, *about: Any):
        super().__init__(*about)
        config = self._serving.config
        self._has_reasoning = config.reasoning_parser is not None
        self._is_parsed = self._has_reasoning or bool(self._asked.offered_tools)
        self._parts: dict[int, AnswerParts] = {}  # by the answer's place

    async def _requests(self) -> list[EngineRequest]:
        """One request."""
        asked = self._asked
        others = {"skip_special_tokens": False} if self._is_parsed else {}  # tags may be some
        params = asked.sampling_params(asked.longest, logprobs=asked.num_logprobs, **others)
        order = Order(messages=asked.conversation, options=asked.template_options)
        keep = asked.truncate_prompt_tokens
        ids = await self._texts.prompt_ids(order, "messages", asked.longest, keep)
        form = await self._form(self._texts.text_end(ids))
        return [self._request(0, ids, replace(params, structured_outputs=form))]

    @property
    def _holds_calls(self) -> bool:
        return self._asked.holds_calls and self._serving.config.tool_call_parser is not None

    @property
    def _form_path(self) -> str:
        return "tools" if self._holds_calls else self._asked.form_path

    async def _form(self, prompt_end: str) -> StructuredOutputs | None:
        """What the answer must obey behind its reasoning."""
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
        """Raise ApiError unless a grammar can be made of a form with calls; where it is one schema
        that stands in the way, and found in the time that a form may take, the error names that."""
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

    def _opening(self) -> Body:
        """The prompt's own part of a whole answer."""
        body: Body = {}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        if self._asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs.get(0, [None]))
        return body

    def _chunks(self, place: int, delta: TextDelta, *, is_first: bool) -> list[Body]:
        """A choice for each part of the growth, of which the last has the tokens'; before the
        first, one that says whose message it is."""
        parts = self._parts_of(place)
        told = parts.deltas(delta.text, is_last=delta.finished)
        if told and delta.finished and "tool_calls" in told[-1]:
            told.append({})  # as OpenAI ends calls
        if not told and (not self._is_parsed or self._tells_without_text(delta)):
            told = [{}]
        told = [{"role": "assistant", "content": ""}, *told] if is_first else told
        rest = {"logprobs": None, "finish_reason": None}
        chunks: list[Body] = [{"index": place, "delta": each, **rest} for each in told]
        if told and "role" not in told[-1]:
            chunks[-1] |= {"logprobs": self._logprobs(delta), **self._ending(delta)}
            chunks[-1]["finish_reason"] = parts.finish_reason(delta.finish_reason)
        return chunks

    def _tells_without_text(self, delta: TextDelta) -> bool:
        """Whether there is something to tell of an answer's growth though its text is held."""
        return delta.finished or bool(delta.logprobs) or self._asked.return_token_ids

    def _parts_of(self, place: int) -> AnswerParts:
        """What an answer's text consists of so far."""
        found = self._parts.get(place)
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
            keeps, has_reasoning = not asked.stream, self._has_reasoning
            found = AnswerParts(parser, has_reasoning=has_reasoning, keeps=keeps)
            self._parts[place] = found
        return found

    def _read(self, place: int, delta: TextDelta) -> None:
        self._parts_of(place).add(delta.text, is_last=delta.finished)

    def _choice(self, place: int, answer: TextDelta) -> Body:
        """A choice with a message."""
        parts = self._parts_of(place)
        return {
            "index": place,
            "message": parts.message(),
            "logprobs": self._logprobs(answer),
            **self._ending(answer),
            "finish_reason": parts.finish_reason(answer.finish_reason),
        }

    def _logprobs(self, delta: TextDelta) -> Body | None:
        num_top = self._asked.num_logprobs
        if num_top is None:
            return None
        content = []
        for token_id, found in zip(delta.token_ids, delta.logprobs or (), strict=True):
            best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
            top = [self._entry(each, own.logprob) for each, own in best]
            content.append(self._entry(token_id, found[token_id].logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Body:
        as_id, texts = self._asked.return_tokens_as_token_ids, self._texts
        shown = f"token_id:{token_id}" if as_id else texts.token_text(token_id)
        own = list(texts.token_bytes(token_id))  # of a part of a character, which has no text
        return {"token": shown, "logprob": finite(logprob), "bytes": own}


def _tells_many(news: Sequence[News]) -> bool:
    """Whether many tokens with candidates came at a time, as for a reader that was slow."""
    grown = (own for _, delta in news for own in delta.deltas)
    return sum(len(own.logprobs or ()) for own in grown) > 8 * MANY_TOKENS


def prompt_logprobs(candidates: Iterable[Candidates | None]) -> list[Body | None]:
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
