"""What the engine keeps of a request: its answers, their text and log-probabilities, its times."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jpaged.core.beam import BeamSearch, Hypothesis
from jpaged.core.plan import EmittedToken, ScheduledSequence
from jpaged.core.request import FinishReason, NoTokenError, Request, Sequence
from jpaged.errors import RequestError
from jpaged.observe.statistics import RequestMetrics
from jpaged.outputs import CompletionOutput, Logprob, RequestDelta, RequestOutput, TextDelta
from jpaged.runtime.results import TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.structured_outputs.mask_client import Answer, Constraint
from jpaged.structured_outputs.matcher import GrammarError
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import LOGPROB_COLUMN, NUM_TOKEN_COLUMNS, RANK_COLUMN, TOKEN_COLUMN


class TokenLogprobs(SequenceOf[dict[int, Logprob]]):
    """For each token its candidates by id: itself first, then the likeliest ones.

    Kept as the device gave them, 4 bytes a number, and all made when one is read: an entry with
    five candidates takes the host several microseconds, texts more, and a step has hundreds. Copied
    or pickled it becomes a list.

    Args:
        scores: int32 [C, W], as `pallas_kernels.token_scores` packs them; kept, so pass a copy of
            what may change.
        tokenizer: None without one.
        made: The first entries, as far as others have made them of the same scores; those that are
            made here are added.
    """

    def __init__(
        self,
        scores: np.ndarray,
        tokenizer: Tokenizer | None,
        cached_entries: list[dict[int, Logprob]] | None = None,
    ):
        self._scores, self._tokenizer = scores, tokenizer
        self._cached_entries = [] if cached_entries is None else cached_entries

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return iter(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceOf) and self._entries == list(other)

    def __add__(self, other: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(self._entries)

    def __reduce__(self) -> Any:
        return list, (self._entries,)

    @property
    def _entries(self) -> list[dict[int, Logprob]]:
        cached_entries, num = self._cached_entries, len(self._scores)
        if len(cached_entries) < num:
            cached_entries += self._decode_scores(self._scores[len(cached_entries) :])
        return cached_entries if len(cached_entries) == num else cached_entries[:num]

    def _decode_scores(self, scores: np.ndarray) -> list[dict[int, Logprob]]:
        token_ids = [[row[TOKEN_COLUMN], *row[NUM_TOKEN_COLUMNS::2]] for row in scores.tolist()]
        floats = scores.view(np.float32).tolist()
        logprobs = [[row[LOGPROB_COLUMN], *row[NUM_TOKEN_COLUMNS + 1 :: 2]] for row in floats]
        texts: dict[int, str] = {}
        if self._tokenizer is not None:
            for token_id in {token_id for row in token_ids for token_id in row}:
                texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        entries = []
        for (chosen, *likeliest), (chosen_logprob, *others), rank in zip(
            token_ids, logprobs, scores[:, RANK_COLUMN].tolist(), strict=True
        ):
            entry = {chosen: Logprob(chosen_logprob, rank, texts.get(chosen))}
            for top_rank, (token_id, logprob) in enumerate(zip(likeliest, others, strict=True), 1):
                if token_id != chosen and logprob != -np.inf:  # no grammar forbids it
                    entry[token_id] = Logprob(logprob, top_rank, texts.get(token_id))
            entries.append(entry)
        return entries


def _detokenizer(
    tokenizer: Tokenizer | None, token_ids: SequenceOf[int], params: SamplingParams
) -> Detokenizer:
    """Return a detokenizer of the tokens that follow `token_ids`."""
    return Detokenizer(
        tokenizer if params.detokenize else None,
        token_ids,
        stop=params.stop_strings,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


@dataclass(slots=True, eq=False)
class SampleState:
    """One of a request's samples from its first token to its last output; see `RequestState`."""

    sequence: Sequence
    params: SamplingParams
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    cumulative_logprob: float = 0.0  # of its tokens, as far as log-probabilities were read
    answer: Answer | None = None  # how its grammar took the tokens that were read
    _detokenizer: Detokenizer = field(init=False)
    _scores: bytearray = field(default_factory=bytearray)  # a row a token, if they are asked for
    _scores_width: int = 4 * NUM_TOKEN_COLUMNS  # of these rows, in bytes
    _cached_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the first rows
    _stop_string: str | None = None
    _is_complete: bool = False  # its grammar allows nothing more
    _num_read: int = 0  # output tokens that the detokenizer has
    _num_sent: int = 0  # output tokens that a delta told of

    def __post_init__(self):
        self._detokenizer = _detokenizer(self.tokenizer, self.sequence.token_ids, self.params)

    def accept_token(self, reason: FinishReason | None) -> bool:
        """Take in the sequence's newest token, and why it ended the sample if it did.

        Only needed of the last token, and of every one where stop strings are looked for.

        Returns:
            Whether it completed a stop string, or what the grammar allows.

        Raises:
            GrammarError: the grammar does not allow the token.
        """
        if self.answer is not None and reason is not FinishReason.STOP:
            # With its last token an answer is whole, whatever comes of the mask behind it.
            if self.answer.error is not None and reason is None:
                raise self.answer.error
            self._is_complete = self.answer.is_stopped
        if not (self.params.stop_strings or reason or self._is_complete):
            return False  # its text can wait
        stop = self._read_tokens(ended_by_token=reason is FinishReason.STOP)
        if stop is not None or reason is not None or self._is_complete:
            self._stop_string = stop
            self._detokenizer.finish()  # others of the request may go on for long
        return stop is not None or self._is_complete

    def accept_scores(self, scores: TokenScores, index: int) -> None:
        """Take in how likely the newest token was: row `index` of `scores`."""
        self.cumulative_logprob += scores.logprob_list[index]
        if self.params.logprobs is not None:
            row = scores.row_bytes(index, self.params.logprobs)
            self._scores += row
            self._scores_width = len(row)

    def finish(self) -> None:
        """Nothing more will come: release the text that was held back."""
        self._read_tokens()
        self._detokenizer.finish()

    def output(self, index: int, *, is_ranked: bool) -> CompletionOutput:
        """The sample as the caller sees it now.

        Args:
            index: Its place among the answers.
            is_ranked: Whether the sum of its log-probabilities decides that.
        """
        wants_logprobs = self.params.logprobs is not None
        self._read_tokens()
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text,
            token_ids=self.sequence.output_token_ids,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs or is_ranked else None,
            logprobs=self._make_logprobs() if wants_logprobs else None,
            finish_reason=self.sequence.finish_reason,
            stop_reason=None if self.sequence.finish_reason is None else self._find_stop_reason(),
        )

    @property
    def has_update(self) -> bool:
        """Whether a delta would tell anything; not for one whose last delta was taken."""
        sequence = self.sequence
        return sequence.finish_reason is not None or sequence.num_output_tokens > self._num_sent

    def take_delta(self, request_id: str) -> TextDelta:
        """What is new since the last delta."""
        sequence, start = self.sequence, self._num_sent
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + start :])
        self._num_sent += len(token_ids)
        self._read_tokens()
        return TextDelta(
            text=self._detokenizer.take_delta(),
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=self._find_stop_reason(),
            logprobs=list(self._make_logprobs(start)) if self.params.logprobs is not None else None,
            request_id=request_id,
            index=sequence.index,
        )

    def _read_tokens(self, *, ended_by_token: bool = False) -> str | None:
        """Give the detokenizer the sequence's new tokens; the stop string that it found, if any."""
        sequence = self.sequence
        new = sequence.token_ids[sequence.num_prompt_tokens + self._num_read :]
        self._num_read += len(new)
        return self._detokenizer.append(new, ended_by_token=ended_by_token)

    def _make_logprobs(self, start: int = 0) -> TokenLogprobs:
        """Those of the tokens from `start` on; what is made of all is made once."""
        width = self._scores_width
        rows = np.frombuffer(bytes(self._scores[start * width :]), np.int32)
        cached_entries = self._cached_logprobs if start == 0 else None
        return TokenLogprobs(rows.reshape(-1, width // 4), self.tokenizer, cached_entries)

    def _find_stop_reason(self) -> str | int | None:
        if self._stop_string is not None:
            return self._stop_string
        if self._is_complete:
            return None
        if self.sequence.finish_reason is not FinishReason.STOP:
            return None
        return _find_stop_token_id(self.sequence.token_ids, self.eos_token_ids)


def _find_stop_token_id(token_ids: SequenceOf[int], eos_token_ids: frozenset[int]) -> int | None:
    return None if token_ids[-1] in eos_token_ids else token_ids[-1]


@dataclass(eq=False)
class RequestState:
    """One request from `add_request` to its last output.

    Attributes:
        request: The scheduler's view.
        params: As the caller gave them.
        prompt: Its text, if the caller gave one.
        prompt_token_ids: Its tokens.
        tokenizer: None without one.
        eos_token_ids: The model's own end tokens.
        constraint: What its answers obey; None for no grammar.
        metrics: When things happened.
        polled: Whether `Engine.step` reports it.
        is_quiet: Whether its next token need not be told, unless it is the last.
        error: Why it failed.
        samples: In the order of their numbers; none for a beam search, whose answers are known only
            at its end.
        growing: Those whose last delta was not taken.
    """

    request: Request
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    constraint: Constraint | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    is_polled: bool = False
    can_skip_updates: bool = False
    error: BaseException | None = None
    samples: list[SampleState] = field(init=False)
    undelivered_samples: list[SampleState] = field(init=False)
    _reads_every_token: bool = field(
        init=False
    )  # each token may be the last one, as its text has it
    _is_ranked: bool = field(init=False)
    _has_sent_prompt_logprobs: bool = False
    _prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        sequences = self.request.sequences if self.request.beam is None else ()
        shared = self.params, self.tokenizer, self.eos_token_ids
        answers = [None] * len(sequences) if self.constraint is None else self.constraint.answers
        self.samples = [
            SampleState(sequence, *shared, answer=answer)
            for sequence, answer in zip(sequences, answers, strict=True)
        ]
        self.undelivered_samples = list(self.samples)
        self._reads_every_token = bool(self.params.stop_strings)
        self._is_ranked = self.params.is_ranked

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def is_constrained(self) -> bool:
        """Whether the request has a grammar."""
        return self.constraint is not None

    def check_grammar(self) -> None:
        """Wait until the grammar is compiled. GrammarError if it cannot be compiled."""
        if self.constraint is not None:
            self.constraint.check()

    def accept_token(self, emitted: EmittedToken, scores: TokenScores | None, index: int) -> bool:
        """Take a sampled token in; needed of each while the request is not quiet, and of the last.

        Args:
            emitted: The token.
            scores: The step's log-probabilities, if a request asked.
            index: The sequence's row in `scores`.

        Returns:
            Whether the token completed a stop string, or what a grammar allows.

        Raises:
            GrammarError: the grammar does not allow the token.
        """
        if self.metrics.first_token_time is None:
            self.record_first_token()
        sample = self.samples[emitted.sequence.index]
        if scores is not None and self.params.needs_logprobs:
            sample.accept_scores(scores, index)
        is_over = sample.answer is not None and sample.answer.is_over
        if emitted.finish_reason is None and not (self._reads_every_token or is_over):
            return False
        return sample.accept_token(emitted.finish_reason)

    def record_first_token(self) -> None:
        """A token of the request was read; after the first, whose time is kept, it may be quiet."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
            params = self.params
            self.can_skip_updates = not (
                self.is_polled or params.needs_logprobs or self._reads_every_token
            )

    def accept_prompt_logprobs(self, item: ScheduledSequence, scores: TokenScores) -> None:
        """Take in how likely a chunk's next prompt tokens were; a recomputed chunk changes nothing.

        Args:
            item: The chunk.
            scores: One row for each prompt token right after one of its positions.
        """
        known = self._prompt_logprobs = self._prompt_logprobs or [None]
        packed = scores.packed_top(self.params.prompt_logprobs or 0)
        new = packed[max(len(known) - item.start - 1, 0) :]
        known.extend(TokenLogprobs(new, self.tokenizer))

    def fail(self, error: BaseException) -> None:
        """End the request with an error, even if it has just finished. Keep the first error.

        If the grammar and the sampling parameters together allow no token, the error names both.
        """
        if isinstance(error, NoTokenError) and self.constraint is not None:
            error = self._find_conflict(self.constraint) or error
        self.error = self.error or error
        if self.request.is_finished:
            self.request.finish_reason = FinishReason.ERROR
            for sequence in self.request.sequences:
                sequence.finish_reason = FinishReason.ERROR

    def _find_conflict(self, constraint: Constraint) -> GrammarError | None:
        """Return an error if the next token of some sample is forbidden by the grammar and the
        sampling parameters together; None if the model's logits are at fault."""
        spec = self.params.structured_outputs
        for sample, answer in zip(self.samples, constraint.answers, strict=True):
            num_tokens = sample.sequence.num_output_tokens
            allowed = constraint.allowed_ids(answer)
            names = self.params.names_that_forbid_all(allowed, num_tokens, self.eos_token_ids)
            if names and spec is not None:
                return GrammarError(
                    f"structured_outputs.{spec.kind}",
                    f"and {' and '.join(names)} together allow no token after {num_tokens} tokens "
                    "of the answer",
                    remedy="change one of them, or leave it out",
                )
        return None

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if the request failed."""
        if self.error is not None:
            raise RuntimeError(f"request {self.request_id!r} failed") from self.error

    def finish(self) -> None:
        """Nothing more will come: release what was held back."""
        self.metrics.finished_time = time.monotonic()
        for sample in self.samples:
            sample.finish()

    def output(self) -> RequestOutput:
        """The request as the caller sees it now."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._copy_prompt_logprobs(),
            outputs=self._sample_outputs()
            if request.beam is None
            else self._beam_outputs(request.beam),
            finished=request.is_finished,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=replace(self.metrics),
        )

    def take_delta(self) -> RequestDelta:
        """What is new since the last call; the cost is that of the new tokens."""
        return RequestDelta(
            request_id=self.request_id,
            deltas=list(self.take_sample_deltas())
            if self.params.is_streamable
            else self._final_deltas(),
            finished=self.request.is_finished,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self.request.sequences[0].num_cached_tokens or 0,
            metrics=replace(self.metrics) if self.request.is_finished else None,
            error=None if self.error is None else str(self.error) or type(self.error).__name__,
            error_info=self.error.info if isinstance(self.error, RequestError) else None,
        )

    def take_sample_deltas(self) -> Iterator[TextDelta]:
        """What each sample that has news grew by since its last delta, made when it is asked for:
        with what came meanwhile."""
        for sample in [sample for sample in self.undelivered_samples if sample.has_update]:
            delta = sample.take_delta(self.request_id)
            if delta.finished:
                self.undelivered_samples.remove(sample)
            yield delta

    def _final_deltas(self) -> list[TextDelta]:
        """The answers, once it is known which they are."""
        answers = self.output().outputs if self.request.is_finished else ()
        return [TextDelta.of(self.request_id, answer) for answer in answers]

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self._has_sent_prompt_logprobs or self.metrics.first_token_time is None:
            return None
        self._has_sent_prompt_logprobs = True
        return self._copy_prompt_logprobs()

    def _sample_outputs(self) -> list[CompletionOutput]:
        """All samples in their order, or the best of them so far, best first."""
        chosen, is_ranked = self.samples, self._is_ranked
        if is_ranked:  # a stable sort: of equal ones the earlier sample comes first
            chosen = sorted(chosen, key=lambda sample: -sample.cumulative_logprob)[: self.params.n]
        return [sample.output(i, is_ranked=is_ranked) for i, sample in enumerate(chosen)]

    def _beam_outputs(self, search: BeamSearch) -> list[CompletionOutput]:
        """A beam search's best answers; none before its end, or if it did not come to it."""
        if self.request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return []
        best = search.hypotheses[: self.params.n]
        return [self._beam_output(i, hypothesis) for i, hypothesis in enumerate(best)]

    def _beam_output(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        token_ids = hypothesis.output_token_ids
        detokenizer = _detokenizer(self.tokenizer, self.prompt_token_ids, self.params)
        detokenizer.append(token_ids, ended_by_token=hypothesis.is_ended)
        detokenizer.finish()
        return CompletionOutput(
            index=index,
            text=detokenizer.text,
            token_ids=list(token_ids),
            cumulative_logprob=hypothesis.cumulative_logprob,
            finish_reason=FinishReason.STOP if hypothesis.is_ended else FinishReason.LENGTH,
            stop_reason=_find_stop_token_id(token_ids, self.eos_token_ids)
            if hypothesis.is_ended
            else None,
            score=hypothesis.score,
        )

    def _copy_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return list(self._prompt_logprobs) or [None]
