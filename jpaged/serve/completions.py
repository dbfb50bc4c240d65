"""`/v1/completions`: prompts to jobs, and their answers as OpenAI writes them."""

from collections.abc import Sequence

from jpaged import TextDelta
from jpaged.serve.answers import Tally
from jpaged.serve.generation import Body, Choice, Generation, without_answer
from jpaged.serve.logprobs import CompletionLogprobs, TokenText, joined, prompt_logprobs
from jpaged.serve.protocol import CompletionRequest
from jpaged.serve.run import Job, News


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

    async def jobs(self) -> list[Job]:
        """One a prompt. A prompt that is only scored is so with the first token after it."""
        asked = self._asked
        scored = asked.logprobs if asked.echo else None
        scored = asked.prompt_logprobs if scored is None else scored
        params = asked.sampling_params(
            max(asked.max_tokens, 1), logprobs=asked.logprobs, prompt_logprobs=scored
        )
        special, keep = asked.add_special_tokens, asked.truncate_prompt_tokens
        texts = self.serving.texts
        last = texts.num_kept(asked.max_tokens, keep)
        jobs = []
        for i, prompt in enumerate(asked.prompts):
            path = f"prompt[{i}]" if self.num_prompts > 1 else "prompt"
            ids = await texts.encode(prompt, path, add_special_tokens=special, last=last)
            ids = texts.fitted(ids, path, asked.max_tokens, keep)
            jobs.append(self.job(i, ids, params))
        return jobs

    async def choices(self, jobs: Sequence[Job]) -> list[Choice]:
        """Who writes the answers."""
        asked, texts = self._asked, self.serving.texts
        found: list[Choice] = []
        for i, job in enumerate(jobs):
            text = await texts.decode(job.prompt_token_ids) if asked.echo else ""
            for index in range(i * asked.n, (i + 1) * asked.n):
                found.append(CompletionChoice(asked, index, i, text, texts.token_text))
        return found

    def told(self, news: News) -> News:
        """With max_tokens=0 nothing of the answer."""
        return news if self._asked.max_tokens else without_answer(news)
