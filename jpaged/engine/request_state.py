"""What the engine keeps of a request beside the scheduler's part: its answers, scores, times."""

import time
from dataclasses import dataclass, field, replace

from jpaged.core.plan import Emitted, ScheduledSequence
from jpaged.core.request import FinishReason, Request
from jpaged.engine.inputs import Prompt
from jpaged.engine.sample_state import SampleState, hypothesis_output
from jpaged.engine.token_logprobs import TokenLogprobs
from jpaged.observe.statistics import RequestMetrics
from jpaged.outputs import CompletionOutput, Logprob, RequestDelta, RequestOutput, TextDelta
from jpaged.runtime.model_runner import TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer


@dataclass(eq=False)
class RequestState:
    """One request from `add_request` to its last output.

    Attributes:
        request: The scheduler's view.
        params: As the caller gave them.
        prompt: As the caller gave it, tokenised.
        tokenizer: None without one.
        eos_token_ids: The model's own end tokens.
        metrics: When things happened.
        polled: Whether `Engine.step` reports it.
        is_quiet: Whether nobody has to hear of its next token, unless that is its last.
        error: Why it failed.
        samples: In the order of their numbers; none for a beam search, whose answers are known only
            at its end.
    """

    request: Request
    params: SamplingParams
    prompt: Prompt
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    polled: bool = False
    is_quiet: bool = False
    error: BaseException | None = None
    samples: list[SampleState] = field(init=False)
    _growing: list[SampleState] = field(init=False)
    _told_prompt: bool = False
    _prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        sequences = self.request.sequences if self.request.beam is None else ()
        self.samples = [
            SampleState(sequence, self.params, self.tokenizer, self.eos_token_ids)
            for sequence in sequences
        ]
        self._growing = list(self.samples)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def accept(self, emitted: Emitted, scores: TokenScores | None, index: int) -> bool:
        """Take a sampled token in; needed of each while the request is not quiet, and of the last.

        Args:
            emitted: The token.
            scores: The step's log-probabilities, if anybody asked.
            index: The sequence's row in `scores`.

        Returns:
            Whether the token completed a stop string.
        """
        self.note_first_token()
        sample = self.samples[emitted.sequence.index]
        if scores is not None and self.params.needs_logprobs:
            sample.accept_scores(scores, index)
        if emitted.finish_reason is None and not self.params.stop_strings:
            return False
        return sample.accept(emitted.finish_reason)

    def note_first_token(self) -> None:
        """A token of the request was read; after the first, whose time is kept, it may be quiet."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
            params = self.params
            self.is_quiet = not (self.polled or params.needs_logprobs or params.stop_strings)

    def accept_prompt_logprobs(self, item: ScheduledSequence, scores: TokenScores) -> None:
        """Take in how likely a chunk's next prompt tokens were; a recomputed chunk changes nothing.

        Args:
            item: The chunk.
            scores: One row for each prompt token right after one of its positions.
        """
        known = self._prompt_logprobs = self._prompt_logprobs or [None]
        packed = scores.first(self.params.prompt_logprobs or 0)
        new = packed[max(len(known) - item.start - 1, 0) :]
        known.extend(TokenLogprobs(new, self.tokenizer))

    def fail(self, error: BaseException) -> None:
        """It ends with an error, also if it has just come to its own end; the first one counts."""
        self.error = self.error or error
        if self.request.is_finished:
            self.request.finish_reason = FinishReason.ERROR
            for sequence in self.request.sequences:
                sequence.finish_reason = FinishReason.ERROR

    def finish(self) -> None:
        """Nothing more will come: release what was held back."""
        self.metrics.finished_time = time.monotonic()
        for sample in self.samples:
            sample.finish()

    def output(self) -> RequestOutput:
        """The request as the caller sees it now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids or (),
            prompt_logprobs=self._own_prompt_logprobs(),
            outputs=self._outputs() if self.request.beam is None else self._found(),
            finished=self.request.is_finished,
            num_cached_tokens=self.request.sequences[0].num_cached_tokens or 0,
            metrics=replace(self.metrics),
        )

    def take_delta(self) -> RequestDelta:
        """What is new since the last call; the cost is that of the new tokens."""
        return RequestDelta(
            request_id=self.request_id,
            deltas=self._grown() if self.params.is_streamable else self._whole(),
            finished=self.request.is_finished,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self.request.sequences[0].num_cached_tokens or 0,
            metrics=replace(self.metrics) if self.request.is_finished else None,
            error=None if self.error is None else str(self.error) or type(self.error).__name__,
        )

    def _grown(self) -> list[TextDelta]:
        news = [s.take_delta(self.request_id) for s in self._growing if s.has_news]
        if any(delta.finished for delta in news):
            self._growing = [s for s in self._growing if s.sequence.finish_reason is None]
        return news

    def _whole(self) -> list[TextDelta]:
        """The answers, once it is known which they are."""
        if not self.request.is_finished:
            return []
        return [TextDelta.of(self.request_id, answer) for answer in self.output().outputs]

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self._told_prompt or self.metrics.first_token_time is None:
            return None
        self._told_prompt = True
        return self._own_prompt_logprobs()

    def _outputs(self) -> list[CompletionOutput]:
        """All samples in their order, or the best of them so far, best first."""
        chosen, is_ranked = self.samples, self.params.is_ranked
        if is_ranked:  # a stable sort: of equal ones the earlier sample comes first
            chosen = sorted(chosen, key=lambda sample: -sample.cumulative_logprob)[: self.params.n]
        return [sample.output(i, is_ranked=is_ranked) for i, sample in enumerate(chosen)]

    def _found(self) -> list[CompletionOutput]:
        """A beam search's best answers; none before its end, or if it was aborted."""
        beam, ids = self.request.beam, self.prompt.token_ids or []
        if beam is None or not self.is_found:
            return []
        return [
            hypothesis_output(
                i, found, Detokenizer(self.tokenizer, ids, self.params), self.eos_token_ids
            )
            for i, found in enumerate(beam.hypotheses[: self.params.n])
        ]

    @property
    def is_found(self) -> bool:
        """Whether it is a beam search that came to its own end."""
        reason = self.request.finish_reason
        return self.request.beam is not None and reason in ("stop", "length")

    def _own_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return list(self._prompt_logprobs) or [None]
