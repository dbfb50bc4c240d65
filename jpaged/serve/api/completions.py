"""`/v1/completions`: complete prompts in the format of OpenAI's text completions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from typing_extensions import override

from jpaged import TextDelta
from jpaged.serve.api import generation
from jpaged.serve.api.fields import CompletionRequest
from jpaged.serve.api.generation import (
    MIN_LOGPROB,
    ChoicesGeneration,
    JsonObject,
    LogprobsByToken,
    clamp_logprob,
)
from jpaged.serve.engine.client import RequestUpdate
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import TokenizeJob


class CompletionsGeneration(ChoicesGeneration):
    """Runs one request of `/v1/completions` and renders the answers."""

    whole_object = chunk_object = "text_completion"
    _api_request: CompletionRequest

    @override
    async def _make_engine_requests(self) -> list[EngineRequest]:
        api_request, tokenizing = self._api_request, self._tokenizing
        num_prompt_logprobs = api_request.logprobs if api_request.echo else None
        num_prompt_logprobs = (
            api_request.prompt_logprobs if num_prompt_logprobs is None else num_prompt_logprobs
        )
        # The engine scores a prompt only if the request also generates a token. So generate one
        # token even if max_tokens is 0.
        params = api_request.sampling_params(
            max(api_request.max_tokens, 1),
            logprobs=api_request.logprobs,
            prompt_logprobs=num_prompt_logprobs,
        )
        if api_request.spec is not None:
            await tokenizing.check_spec(api_request.spec, api_request.spec_path, self._client)
        requests = []
        for i, prompt in enumerate(api_request.prompts):
            path = f"prompt[{i}]" if len(api_request.prompts) > 1 else "prompt"
            if isinstance(prompt, str):
                prompt = TokenizeJob(prompt, api_request.add_special_tokens)
            ids = await tokenizing.prompt_ids(
                prompt, path, api_request.max_tokens, api_request.truncate_prompt_tokens
            )
            requests.append(self._make_engine_request(i, ids, params))
        if api_request.echo:
            is_untruncated = api_request.truncate_prompt_tokens is None
            self._prompt_texts = [
                prompt
                if isinstance(prompt, str) and is_untruncated
                else await tokenizing.decode(each.prompt_token_ids)
                for prompt, each in zip(api_request.prompts, requests, strict=True)
            ]
        # For each answer, the character offset at which its next token begins.
        self._num_characters = [0] * (len(requests) * api_request.n)
        return requests

    @override
    def _visible_delta(self, delta: TextDelta) -> TextDelta:
        """If `max_tokens` is 0, remove the token that was generated only to score the prompt."""
        if self._api_request.max_tokens:
            return delta
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        scores = delta.logprobs and []
        emptied = replace(delta, text="", token_ids=(), weight_versions=(), logprobs=scores)
        return replace(emptied, finish_reason=reason, stop_reason=None)

    @override
    def _is_large(self, updates: list[RequestUpdate]) -> bool:
        """Return whether to encode the updates in a separate thread, because they have many tokens.

        The log-probabilities of an echoed prompt count as tokens too.
        """
        api_request = self._api_request
        if super()._is_large(updates):
            return True
        if not api_request.echo or api_request.logprobs is None:
            return False
        return any(
            len(self._prompts[index]) > generation.MAX_INLINE_LOGPROBS
            and any(
                index * api_request.n + own.index not in self._started_answers
                for own in delta.deltas
            )
            for index, delta in updates
        )

    @override
    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[JsonObject]:
        index, with_prompt = number // self._api_request.n, is_first and self._api_request.echo
        choice = {
            "index": number,
            "text": (self._prompt_texts[index] if with_prompt else "") + delta.text,
            "logprobs": self._logprobs(number, delta, with_prompt=with_prompt),
            **self._finish_fields(delta),
        }
        if is_first and self._api_request.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[index]
        return [choice]

    @override
    def _choice(self, number: int, answer: TextDelta) -> JsonObject:
        (choice,) = self._chunks(number, answer, is_first=True)
        if self._api_request.prompt_logprobs is not None:
            index = number // self._api_request.n
            choice["prompt_logprobs"] = self._format_prompt_logprobs(index)
        return choice

    def _logprobs(self, number: int, delta: TextDelta, *, with_prompt: bool) -> JsonObject | None:
        """Return the `logprobs` of a choice: the tokens of a delta with their log-probabilities.

        If `with_prompt` is set, the tokens of the prompt come first. The first token of a prompt
        has no log-probability.
        """
        if self._api_request.logprobs is None:
            return None
        ids: Sequence[int] = delta.token_ids
        candidates: Sequence[LogprobsByToken | None] = delta.logprobs or ()
        width, starts = self._tokenizing.num_characters, list[int]()
        if with_prompt:
            index = number // self._api_request.n
            prompt, scores = self._prompts[index], self._prompt_logprobs.get(index, [])
            # If the engine aborted the request, the last tokens of the prompt may have no
            # log-probabilities.
            scores = [*scores, *[None] * (len(prompt) - len(scores))]
            ids, candidates = [*prompt, *ids], [*scores, *candidates]
            # Tokens that the tokenizer added before the text have negative offsets here.
            length = len(self._prompt_texts[index])
            before = min(length - sum(map(width, prompt)), 0)
            *starts, _ = accumulate(map(width, prompt), initial=before)
            self._num_characters[number] = length
        offset = self._num_characters[number]
        widths = map(width, delta.token_ids)
        *offsets, self._num_characters[number] = accumulate(widths, initial=offset)
        found = list(zip(ids, candidates, strict=True))
        return {
            "kept_mass": [None if c is None else c[t].kept_mass for t, c in found],
            "text_offset": [max(start, 0) for start in starts] + offsets,
            "token_logprobs": [
                None if c is None else clamp_logprob(c[t].logprob) for t, c in found
            ],
            "tokens": [self._format_token(token_id) for token_id in ids],
            "top_logprobs": [None if c is None else self._top_logprobs(c) for c in candidates],
        }

    def _top_logprobs(self, candidates: LogprobsByToken) -> dict[str, float]:
        """Return a dict from token text to log-probability.

        If several tokens have the same text, the dict has the highest of their log-probabilities.
        """
        top: dict[str, float] = {}
        for token_id, found in candidates.items():
            text, logprob = self._format_token(token_id), clamp_logprob(found.logprob)
            top[text] = max(logprob, top.get(text, MIN_LOGPROB))
        return top
