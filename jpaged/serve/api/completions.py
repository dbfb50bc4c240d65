"""`/v1/completions`: prompts in, OpenAI's text completions out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from jpaged import TextDelta
from jpaged.serve.api import generation
from jpaged.serve.api.fields import CompletionRequest
from jpaged.serve.api.generation import LOWEST, Candidates, ChoicesGeneration, Json, finite
from jpaged.serve.engine.client import News
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import Order


class Completions(ChoicesGeneration):
    """One request of `/v1/completions`."""

    whole_object = chunk_object = "text_completion"
    _asked: CompletionRequest

    async def _requests(self) -> list[EngineRequest]:
        asked, texts = self._asked, self._texts
        scored = asked.logprobs if asked.echo else None
        scored = asked.prompt_logprobs if scored is None else scored
        # The engine scores a prompt only together with the first token after it.
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
        self._num_characters = [0] * (len(requests) * asked.n)  # already covered by logprobs
        return requests

    def _visible(self, delta: TextDelta) -> TextDelta:
        """Hide the token that was generated only to score the prompt (`max_tokens=0`)."""
        if self._asked.max_tokens:
            return delta
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        scores = delta.logprobs and []
        return replace(
            delta, text="", token_ids=(), logprobs=scores, finish_reason=reason, stop_reason=None
        )

    def _is_large(self, news: list[News]) -> bool:
        """Whether many tokens arrived, or an answer begins by echoing a long prompt's scores."""
        asked = self._asked
        if super()._is_large(news):
            return True
        if not asked.echo or asked.logprobs is None:
            return False
        return any(
            len(self._prompts[index]) > generation.MANY_TOKENS
            and any(index * asked.n + own.index not in self._begun for own in delta.deltas)
            for index, delta in news
        )

    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[Json]:
        index, with_prompt = number // self._asked.n, is_first and self._asked.echo
        choice = {
            "index": number,
            "text": (self._echoed[index] if with_prompt else "") + delta.text,
            "logprobs": self._logprobs(number, delta, with_prompt=with_prompt),
            **self._ending(delta),
        }
        if is_first and self._asked.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[index]
        return [choice]

    def _choice(self, number: int, answer: TextDelta) -> Json:
        (choice,) = self._chunks(number, answer, is_first=True)
        if self._asked.prompt_logprobs is not None:
            index = number // self._asked.n
            choice["prompt_logprobs"] = self._shown_prompt_logprobs(index)
        return choice

    def _logprobs(self, number: int, delta: TextDelta, *, with_prompt: bool) -> Json | None:
        """Return the log-probabilities of new tokens, after those of the prompt if it is echoed.

        The first token of a prompt has no candidates.
        """
        if self._asked.logprobs is None:
            return None
        ids: Sequence[int] = delta.token_ids
        candidates: Sequence[Candidates | None] = delta.logprobs or ()
        width, starts = self._texts.num_characters, list[int]()
        if with_prompt:
            index = number // self._asked.n
            prompt, scores = self._prompts[index], self._prompt_logprobs.get(index, [])
            # A request that was cut short may lack the scores of its last tokens.
            scores = [*scores, *[None] * (len(prompt) - len(scores))]
            ids, candidates = [*prompt, *ids], [*scores, *candidates]
            # A token that the tokenizer puts before a prompt is not part of the prompt's text.
            length = len(self._echoed[index])
            before = min(length - sum(map(width, prompt)), 0)
            *starts, _ = accumulate(map(width, prompt), initial=before)
            self._num_characters[number] = length
        offset = self._num_characters[number]
        widths = map(width, delta.token_ids)
        *offsets, self._num_characters[number] = accumulate(widths, initial=offset)
        found = list(zip(ids, candidates, strict=True))
        return {
            "text_offset": [max(start, 0) for start in starts] + offsets,
            "token_logprobs": [None if c is None else finite(c[t].logprob) for t, c in found],
            "tokens": [self._shown(token_id) for token_id in ids],
            "top_logprobs": [None if c is None else self._top(c) for c in candidates],
        }

    def _top(self, candidates: Candidates) -> dict[str, float]:
        """Return candidates by text; of several tokens with one text, the likeliest."""
        top: dict[str, float] = {}
        for token_id, found in candidates.items():
            text, logprob = self._shown(token_id), finite(found.logprob)
            top[text] = max(logprob, top.get(text, LOWEST))
        return top
