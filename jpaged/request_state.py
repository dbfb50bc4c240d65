"""What the engine keeps of a request beside the scheduler's part: text, scores, times."""

import time
from dataclasses import dataclass, field, replace

from jpaged.core.plan import Emitted, ScheduledSequence
from jpaged.core.request import FinishReason, Request
from jpaged.detokenizer import Detokenizer
from jpaged.inputs import Prompt
from jpaged.metrics import RequestMetrics
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta
from jpaged.runtime.model_runner import TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.tokenizer import Tokenizer


@dataclass(eq=False)
class RequestState:
    """One request from `add_request` to its last output.

    Attributes:
        request: The scheduler's view.
        params: With a seed.
        prompt: As the caller gave it, tokenised.
        detokenizer: Turns its tokens into text.
        tokenizer: For the text of alternatives in logprobs; None without one.
        eos_token_ids: The model's own end tokens.
        metrics: When things happened.
        polled: Whether `Engine.step` reports it.
    """

    request: Request
    params: SamplingParams
    prompt: Prompt
    detokenizer: Detokenizer
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    polled: bool = False
    _stop_string: str | None = None
    _cumulative_logprob: float = 0.0
    _logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    _prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def accept(self, emitted: Emitted, scores: TokenScores | None, index: int) -> bool:
        """Take a sampled token in.

        Args:
            emitted: The token.
            scores: The step's log-probabilities, if anybody asked.
            index: The sequence's row in `scores`.

        Returns:
            Whether the token completed a stop string.
        """
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        if self.params.logprobs is not None and scores is not None:
            self._cumulative_logprob += float(scores.logprobs[index])
            count = self.params.logprobs
            self._logprobs.append(self._candidates(emitted.token_id, scores, index, count))
        self._stop_string = self.detokenizer.append(
            [emitted.token_id], ended_by_token=emitted.finish_reason is FinishReason.STOP
        )
        return self._stop_string is not None

    def accept_prompt_logprobs(self, item: ScheduledSequence, scores: TokenScores) -> None:
        """Take in how likely a chunk's next prompt tokens were; a recomputed chunk changes nothing.

        Args:
            item: The chunk.
            scores: One row for each prompt token right after one of its positions.
        """
        known = self._prompt_logprobs = self._prompt_logprobs or [None]
        prompt, count = item.sequence.token_ids, self.params.prompt_logprobs or 0
        for i in range(max(len(known) - item.start - 1, 0), len(scores.logprobs)):
            known.append(self._candidates(prompt[item.start + 1 + i], scores, i, count))

    def finish(self) -> None:
        """Nothing more will come: release what the detokenizer held back."""
        self.metrics.finished_time = time.monotonic()
        self.detokenizer.finish()

    def output(self) -> RequestOutput:
        """The request as the caller sees it now."""
        sequence = self.request.sequences[0]
        asked = self.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self.detokenizer.text,
            token_ids=sequence.output_token_ids,
            cumulative_logprob=self._cumulative_logprob if asked else None,
            logprobs=list(self._logprobs) if asked else None,
            finish_reason=self.request.finish_reason,
            stop_reason=self._stop_reason(),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids or (),
            prompt_logprobs=self._own_prompt_logprobs(),
            outputs=[completion],
            finished=self.request.is_finished,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            metrics=replace(self.metrics),
        )

    def has_news(self, num_sent: int) -> bool:
        """Whether a delta after output token `num_sent` would tell anything."""
        return self.request.is_finished or self.request.sequences[0].num_output_tokens > num_sent

    def delta(self, num_sent: int) -> TextDelta:
        """What is new since a delta that ended at output token `num_sent`."""
        sequence = self.request.sequences[0]
        asked = self.params.logprobs is not None
        return TextDelta(
            text=self.detokenizer.take_delta(),
            token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + num_sent :]),
            finish_reason=self.request.finish_reason,
            stop_reason=self._stop_reason(),
            logprobs=self._logprobs[num_sent:] if asked else None,
            request_id=self.request_id,
        )

    def _own_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return list(self._prompt_logprobs) or [None]

    def _stop_reason(self) -> str | int | None:
        if self._stop_string is not None:
            return self._stop_string
        if self.request.finish_reason is not FinishReason.STOP:
            return None
        last = self.request.sequences[0].token_ids[-1]
        return None if last in self.eos_token_ids else last

    def _candidates(
        self, token_id: int, scores: TokenScores, index: int, count: int
    ) -> dict[int, Logprob]:
        """The token itself first, then the `count` most likely ones."""
        found = {token_id: (float(scores.logprobs[index]), int(scores.ranks[index]))}
        top = zip(scores.top_token_ids[index, :count], scores.top_logprobs[index], strict=False)
        for rank, (other, logprob) in enumerate(top, start=1):
            found.setdefault(int(other), (float(logprob), rank))
        return {t: Logprob(lp, rank, self._text_of(t)) for t, (lp, rank) in found.items()}

    def _text_of(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode([token_id], skip_special_tokens=False)
