"""The answers of a request as they grow, and how many tokens they are."""

from dataclasses import dataclass, field
from typing import Any

from jpaged import Logprob, TextDelta
from jpaged.serve.run import News


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

        Of a request that was cut short the last deltas are made here, so that each answer ends.
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
