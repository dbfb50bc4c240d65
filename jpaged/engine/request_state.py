"""State of a request in the engine: samples, their text and log-probabilities, and metrics."""

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
from jpaged.outputs import (
    CompletionOutput,
    CompletionScore,
    Logprob,
    RequestDelta,
    RequestOutput,
    TextDelta,
)
from jpaged.runtime.results import TargetLogprobs, TokenScores, scored_positions
from jpaged.sampling_params import SamplingParams
from jpaged.structured_outputs.mask_client import Answer, Constraint
from jpaged.structured_outputs.matcher import GrammarError
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import (
    KEPT_MASS_COLUMN,
    LOGPROB_COLUMN,
    NUM_TOKEN_COLUMNS,
    RANK_COLUMN,
    TOKEN_COLUMN,
)


class TokenLogprobs(SequenceOf[dict[int, Logprob]]):
    """The log-probabilities of tokens: one dict per token, from token id to `Logprob`.

    Each dict contains the token itself first, then the most probable tokens. The log-probabilities
    stay packed, with 4 bytes per number, until the caller reads an entry. Decoding an entry takes
    several microseconds of host time, and a step has hundreds of entries. Copying or pickling this
    sequence gives a list.

    Args:
        scores: int32 [C, W], as packed by `pallas_kernels.token_scores`. The array must not change
            later.
        tokenizer: Tokenizer for the texts of the tokens; None to leave out the texts.
        cached_entries: Decoded entries of the first rows. Entries that are decoded later are
            appended to this list, which several sequences may share.
    """

    # Whether the tokens were sampled. Prompt tokens were not, so their `Logprob.kept_mass` is None.
    _are_sampled = True
    _num_unscored = 0  # number of leading entries that are None

    def __init__(
        self,
        scores: np.ndarray,
        tokenizer: Tokenizer | None,
        cached_entries: list[dict[int, Logprob]] | None = None,
    ):
        self._scores, self._tokenizer = scores, tokenizer
        missing: list[Any] = [None] * self._num_unscored
        self._cached_entries = missing if cached_entries is None else cached_entries

    def __len__(self) -> int:
        return self._num_unscored + len(self._scores)

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
    def token_logprobs(self) -> np.ndarray:
        """Log-probability of each scored token, float32 [C]. No entry is decoded."""
        return self._scores[:, LOGPROB_COLUMN].view(np.float32)

    @property
    def _entries(self) -> list[dict[int, Logprob]]:
        cached_entries, num = self._cached_entries, len(self)
        if len(cached_entries) < num:
            num_decoded = len(cached_entries) - self._num_unscored
            cached_entries += self._decode_scores(self._scores[num_decoded:])
        return cached_entries if len(cached_entries) == num else cached_entries[:num]

    def _decode_scores(self, scores: np.ndarray) -> list[dict[int, Logprob]]:
        token_ids = [[row[TOKEN_COLUMN], *row[NUM_TOKEN_COLUMNS::2]] for row in scores.tolist()]
        floats = scores.view(np.float32).tolist()
        logprobs = [[row[LOGPROB_COLUMN], *row[NUM_TOKEN_COLUMNS + 1 :: 2]] for row in floats]
        texts: dict[int, str] = {}
        if self._tokenizer is not None:
            for token_id in {token_id for row in token_ids for token_id in row}:
                texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        masses = [row[KEPT_MASS_COLUMN] if self._are_sampled else None for row in floats]
        entries = []
        for (chosen, *likeliest), (chosen_logprob, *others), rank, mass in zip(
            token_ids, logprobs, scores[:, RANK_COLUMN].tolist(), masses, strict=True
        ):
            entry = {chosen: Logprob(chosen_logprob, rank, texts.get(chosen), mass)}
            for top_rank, (token_id, logprob) in enumerate(zip(likeliest, others, strict=True), 1):
                # A log-probability of -inf means that a grammar forbids the token, or that
                # truncation (top_k, top_p) removed the token.
                if token_id != chosen and logprob != -np.inf:
                    entry[token_id] = Logprob(logprob, top_rank, texts.get(token_id))
            entries.append(entry)
        return entries


class PromptLogprobs(TokenLogprobs):
    """Log-probabilities of a prompt. The first entry is None, because no token precedes the first
    token.

    `cached_entries` begins with this None.
    """

    _are_sampled, _num_unscored = False, 1


class WeightVersions:
    """Versions of the weights that made the tokens of an answer: pairs (version, index of the first
    token that this version made)."""

    def __init__(self) -> None:
        self._starts: list[tuple[int, int]] = [(0, 0)]

    def add(self, version: int, index: int) -> None:
        """Record that weights with the number `version` compute the token at `index` and all later
        tokens."""
        if self._starts[-1][1] == index:
            self._starts.pop()
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, index))

    @property
    def last(self) -> int:
        """The newest version."""
        return self._starts[-1][0]

    def between(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return which weights made the tokens `start` to `end - 1`, as pairs (version, index).

        `index` is the index of the first token that the version made, relative to `start`.
        """
        if len(self._starts) == 1:  # usually
            return ((self._starts[0][0], 0),) if start < end else ()
        ends = [index for _, index in self._starts[1:]] + [end]
        return tuple(
            (version, max(first - start, 0))
            for (version, first), last in zip(self._starts, ends, strict=True)
            if max(first, start) < min(last, end)
        )


def _detokenizer(
    tokenizer: Tokenizer | None, token_ids: SequenceOf[int], params: SamplingParams
) -> Detokenizer:
    """Return a detokenizer for the output tokens that follow the prompt `token_ids`."""
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
    """State of one sample of a request: its text, log-probabilities and undelivered tokens."""

    sequence: Sequence
    params: SamplingParams
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    cumulative_logprob: float = 0.0  # sum of the log-probabilities that the host has read
    answer: Answer | None = None  # state of the grammar; None without a grammar
    _detokenizer: Detokenizer = field(init=False)
    # One row of packed log-probabilities per output token.
    _scores: bytearray = field(default_factory=bytearray)
    _scores_width: int = 4 * NUM_TOKEN_COLUMNS  # number of bytes per row of `_scores`
    _cached_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # decoded `_scores`
    _stop_string: str | None = None
    _is_complete: bool = False  # whether the grammar is complete and allows no further token
    _num_read: int = 0  # number of output tokens passed to the detokenizer
    _num_sent: int = 0  # output tokens returned in deltas
    weight_versions: WeightVersions = field(default_factory=WeightVersions)

    def __post_init__(self):
        self._detokenizer = _detokenizer(self.tokenizer, self.sequence.token_ids, self.params)

    def accept_token(self, reason: FinishReason | None) -> bool:
        """Process the token that was appended to the sequence most recently.

        If the request has stop strings, call this method after each token. Otherwise, one call
        after the final token is enough.

        Args:
            reason: Why the token ended the sequence; None if the sequence continues.

        Returns:
            Whether the token completed a stop string or the grammar.

        Raises:
            GrammarError: The grammar does not allow the token.
        """
        if self.answer is not None and reason is not FinishReason.STOP:
            # The grammar sets an error if it allows no next token. Ignore the error if this token
            # is the last token of the answer.
            if self.answer.error is not None and reason is None:
                raise self.answer.error
            self._is_complete = self.answer.is_stopped
        if not (self.params.stop_strings or reason or self._is_complete):
            return False  # the text is not needed yet: `take_delta` and `output` will detokenize it
        stop = self._read_tokens(ended_by_token=reason is FinishReason.STOP)
        if stop is not None or reason is not None or self._is_complete:
            self._stop_string = stop
            # Release the held-back text now, because other samples of the request may run much
            # longer.
            self._detokenizer.finish()
        return stop is not None or self._is_complete

    def accept_scores(self, scores: TokenScores, index: int) -> None:
        """Record the log-probabilities of the newest token: row `index` of `scores`."""
        self.cumulative_logprob += scores.logprob_list[index]
        if self.params.logprobs is not None:
            row = scores.row_bytes(index, self.params.logprobs)
            self._scores += row
            self._scores_width = len(row)

    def finish(self) -> None:
        """Release the text that was held back because it might be part of a stop string or of a
        character."""
        self._read_tokens()
        self._detokenizer.finish()

    def output(self, index: int, *, is_ranked: bool) -> CompletionOutput:
        """Return the output of the sample so far.

        Args:
            index: Position of the sample among the answers.
            is_ranked: Whether the answers are ranked by cumulative log-probability.
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
            weight_versions=self.weight_versions.between(0, self.sequence.num_output_tokens),
        )

    @property
    def has_update(self) -> bool:
        """Whether a delta would return new tokens or the finish reason."""
        sequence = self.sequence
        return sequence.finish_reason is not None or sequence.num_output_tokens > self._num_sent

    def take_delta(self, request_id: str) -> TextDelta:
        """Return the tokens and the text since the previous delta."""
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
            weight_versions=self.weight_versions.between(start, self._num_sent),
        )

    def _read_tokens(self, *, ended_by_token: bool = False) -> str | None:
        """Pass the new tokens to the detokenizer. Return the stop string that the detokenizer
        found; None if it found no stop string."""
        sequence = self.sequence
        new = sequence.token_ids[sequence.num_prompt_tokens + self._num_read :]
        self._num_read += len(new)
        return self._detokenizer.append(new, ended_by_token=ended_by_token)

    def _make_logprobs(self, start: int = 0) -> TokenLogprobs:
        """Return the log-probabilities of the output tokens from index `start` on.

        Decoded entries are cached only if `start` is 0.
        """
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
    """State of one request from `add_request` to its last output.

    Attributes:
        request: The scheduler's record of the request.
        params: Sampling parameters from the caller.
        prompt: Text of the prompt; None if the caller passed only token ids.
        prompt_token_ids: Token ids of the prompt.
        tokenizer: Tokenizer of the model; None without a tokenizer.
        eos_token_ids: End tokens of the model.
        constraint: Grammar of the answers; None without a grammar.
        metrics: Times of the request's events.
        is_polled: Whether `Engine.step` and `Engine.take_deltas` return the request.
        can_skip_updates: Whether the loop calls `accept_token` only for the last token of each
            sequence.
        error: Error that ended the request; None if no error occurred.
        samples: Samples in the order of their index. Empty for a beam search, whose answers are
            known only at the end.
        undelivered_samples: Samples whose last delta has not been returned yet.
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
    # Whether the host examines each token when the token arrives. True if the request has stop
    # strings, because any token may complete a stop string.
    _reads_every_token: bool = field(init=False)
    _is_ranked: bool = field(init=False)
    _beam_versions: WeightVersions = field(default_factory=WeightVersions)  # of all beams
    _has_sent_prompt_logprobs: bool = False
    _prompt_scores: list[np.ndarray] = field(default_factory=list)  # packed, one row per token
    _num_scored: int = 0  # rows of `_prompt_scores`
    _cached_prompt_logprobs: list[Any] = field(default_factory=lambda: [None])  # decoded

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
        # No drafts: with a grammar, a token's mask depends on the token before it.
        if self.constraint is not None:
            self.request.takes_drafts = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def is_constrained(self) -> bool:
        """Whether the request has a grammar."""
        return self.constraint is not None

    def start_version(self, version: int) -> None:
        """Record that weights with the number `version` compute the next tokens of the request."""
        for sample in self.samples:
            if sample.sequence.finish_reason is None:
                sample.weight_versions.add(version, sample.sequence.num_output_tokens)
        if self.request.beam is not None and self.request.live_sequences:
            self._beam_versions.add(version, self.request.live_sequences[0].num_output_tokens)

    def check_grammar(self) -> None:
        """Wait until the grammar is compiled. Raise GrammarError if the compilation failed."""
        if self.constraint is not None:
            self.constraint.check()

    def accept_token(self, emitted: EmittedToken, scores: TokenScores | None, index: int) -> bool:
        """Process a sampled token.

        The caller must pass the last token of each sequence, and must pass every token while
        `can_skip_updates` is False.

        Args:
            emitted: The token.
            scores: Log-probabilities of the step; None if no request asked for log-probabilities.
            index: Row of the sequence in `scores`.

        Returns:
            Whether the token completed a stop string or the grammar.

        Raises:
            GrammarError: The grammar does not allow the token.
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
        """Record the time of the first token and set `can_skip_updates`. Later calls do nothing."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
            params = self.params
            self.can_skip_updates = not (
                self.is_polled or params.needs_logprobs or self._reads_every_token
            )

    def accept_prompt_logprobs(
        self, item: ScheduledSequence, scores: TokenScores | TargetLogprobs
    ) -> None:
        """Record the log-probabilities of prompt tokens. Ignore tokens whose log-probabilities are
        recorded already.

        Args:
            item: The chunk of the prompt that the step computed.
            scores: One row for each of `scored_positions(item)`.
        """
        first = item.sequence.first_scored_position or 0
        num_known = first + self._num_scored - scored_positions(item).start
        packed = scores.packed
        if isinstance(scores, TokenScores):
            packed = scores.packed_top(self.params.prompt_logprobs or 0)
        if len(new := packed[max(num_known, 0) :]):
            self._prompt_scores.append(new)
            self._num_scored += len(new)

    def fail(self, error: BaseException) -> None:
        """End the request with an error, even if it has just finished; keep only the first error.

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
        """Return an error if the grammar and the sampling parameters together allow no next token.

        Otherwise, return None: the model's logits are then the reason that no token was sampled.
        """
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
                    remedy="change or omit one of them",
                )
        return None

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if the request failed."""
        if self.error is not None:
            raise RuntimeError(f"request {self.request_id!r} failed") from self.error

    def finish(self) -> None:
        """Record the end of the request, and release the held-back text of its samples."""
        self.metrics.finished_time = time.monotonic()
        for sample in self.samples:
            sample.finish()

    def output(self) -> RequestOutput:
        """Return the output of the request so far."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._make_prompt_logprobs(),
            outputs=self._sample_outputs()
            if request.beam is None
            else self._beam_outputs(request.beam),
            finished=request.is_finished,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=replace(self.metrics),
        )

    def take_delta(self) -> RequestDelta:
        """Return the new tokens since the previous call. The call takes time proportional to their
        number."""
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
        """Yield one delta for each sample that has an update.

        The generator creates a delta only when the caller requests it. The delta therefore includes
        tokens that arrived while the caller processed the previous delta.
        """
        for sample in [sample for sample in self.undelivered_samples if sample.has_update]:
            delta = sample.take_delta(self.request_id)
            if delta.finished:
                self.undelivered_samples.remove(sample)
            yield delta

    def _final_deltas(self) -> list[TextDelta]:
        """Return one delta per answer, with the whole answer, if the request has finished.
        Otherwise return no deltas."""
        answers = self.output().outputs if self.request.is_finished else ()
        return [TextDelta.of(self.request_id, answer) for answer in answers]

    def completion_score(self) -> CompletionScore:
        """Return the score of a finished request from `Engine.score_completions`."""
        sequence = self.request.sequences[0]
        scores = TargetLogprobs(np.concatenate(self._prompt_scores))
        return CompletionScore(
            token_ids=self.prompt_token_ids[sequence.first_scored_position :],
            logprobs=scores.logprobs.tolist(),
            is_greedy=scores.is_greedy.tolist(),
            num_cached_tokens=sequence.num_cached_tokens or 0,
            weights_version=self.samples[0].weight_versions.last,
        )

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self._has_sent_prompt_logprobs or self.metrics.first_token_time is None:
            return None
        self._has_sent_prompt_logprobs = True
        found = self._make_prompt_logprobs()
        return None if found is None else list(found)

    def _sample_outputs(self) -> list[CompletionOutput]:
        """Return all samples in their order, or the `n` best samples if the answers are ranked."""
        chosen, is_ranked = self.samples, self._is_ranked
        # The sort is stable, so samples with equal scores stay in the order of their indices.
        if is_ranked:
            chosen = sorted(chosen, key=lambda sample: -sample.cumulative_logprob)[: self.params.n]
        return [sample.output(i, is_ranked=is_ranked) for i, sample in enumerate(chosen)]

    def _beam_outputs(self, search: BeamSearch) -> list[CompletionOutput]:
        """Return the best answers of a completed beam search.

        The list is empty before the search ends, and if the search was aborted or failed.
        """
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
            weight_versions=self._beam_versions.between(0, len(token_ids)),
        )

    def _make_prompt_logprobs(self) -> PromptLogprobs | None:
        if self.params.prompt_logprobs is None:
            return None
        empty = np.zeros((0, NUM_TOKEN_COLUMNS), np.int32)
        packed = np.concatenate(self._prompt_scores) if self._prompt_scores else empty
        return PromptLogprobs(packed, self.tokenizer, self._cached_prompt_logprobs)
