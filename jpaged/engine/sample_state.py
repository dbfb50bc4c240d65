"""What the engine keeps of one answer while it is made, and how its output looks."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from jpaged.core.beam import Hypothesis
from jpaged.core.request import FinishReason, Sequence
from jpaged.engine.token_logprobs import TokenLogprobs
from jpaged.outputs import CompletionOutput, Logprob, TextDelta
from jpaged.runtime.model_runner import TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import NUM_FACTS


class SampleState:
    """One of a request's samples from its first token to its last output.

    Args:
        sequence: The scheduler's view.
        params: The request's.
        tokenizer: None without one.
        eos_token_ids: The model's own end tokens.

    Attributes:
        sequence: The scheduler's view.
        cumulative_logprob: Of its tokens, as far as log-probabilities were read.
    """

    __slots__ = (
        "_detokenizer",
        "_eos_token_ids",
        "_made_logprobs",
        "_num_logprobs",
        "_num_read",
        "_num_sent",
        "_scores",
        "_scores_width",
        "_stop_string",
        "_tokenizer",
        "cumulative_logprob",
        "sequence",
    )

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ):
        self.sequence = sequence
        self.cumulative_logprob = 0.0
        self._detokenizer = Detokenizer(tokenizer, sequence.token_ids, params)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._num_logprobs = params.logprobs
        self._scores = bytearray()  # of each token a row, if they are asked for
        self._made_logprobs: list[dict[int, Logprob]] = []  # of the first of these rows
        self._scores_width = 4 * NUM_FACTS  # of these rows, in bytes
        self._stop_string: str | None = None
        self._num_read = 0  # output tokens that the detokenizer has
        self._num_sent = 0  # output tokens that a delta told of

    def accept(self, reason: FinishReason | None) -> bool:
        """Take in the sequence's newest token, and why it ended the sample if it did.

        Only needed of the last token, and of every one where stop strings are looked for.

        Returns:
            Whether it completed a stop string.
        """
        stop = self._read_tokens(ended_by_token=reason is FinishReason.STOP)
        if stop is not None or reason is not None:
            self._stop_string = stop
            self._detokenizer.finish()  # others of the request may go on for long
        return stop is not None

    def accept_scores(self, scores: TokenScores, index: int) -> None:
        """Take in how likely the newest token was: row `index` of `scores`."""
        self.cumulative_logprob += scores.logprob_list[index]
        if self._num_logprobs is not None:
            row = scores.row_bytes(index, self._num_logprobs)
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
        asked = self._num_logprobs is not None
        self._read_tokens()
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text,
            token_ids=self.sequence.output_token_ids,
            cumulative_logprob=self.cumulative_logprob if asked or is_ranked else None,
            logprobs=self._logprobs() if asked else None,
            finish_reason=self.sequence.finish_reason,
            stop_reason=self._stop_reason(),
        )

    @property
    def has_news(self) -> bool:
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
            stop_reason=self._stop_reason(),
            logprobs=list(self._logprobs(start)) if self._num_logprobs is not None else None,
            request_id=request_id,
            index=sequence.index,
        )

    def _read_tokens(self, *, ended_by_token: bool = False) -> str | None:
        """Give the detokenizer the sequence's new tokens; the stop string that it found, if any."""
        sequence = self.sequence
        new = sequence.token_ids[sequence.num_prompt_tokens + self._num_read :]
        self._num_read += len(new)
        return self._detokenizer.append(new, ended_by_token=ended_by_token)

    def _logprobs(self, start: int = 0) -> TokenLogprobs:
        """Those of the tokens from `start` on; what is made of all is made once."""
        width = self._scores_width
        copied = np.frombuffer(bytes(self._scores[start * width :]), np.int32)
        made = self._made_logprobs if start == 0 else None
        return TokenLogprobs(copied.reshape(-1, width // 4), self._tokenizer, made)

    def _stop_reason(self) -> str | int | None:
        if self._stop_string is not None:
            return self._stop_string
        if self.sequence.finish_reason is not FinishReason.STOP:
            return None
        return _stop_token(self.sequence.token_ids, self._eos_token_ids)


def hypothesis_output(
    index: int,
    found: Hypothesis,
    detokenizer: Detokenizer,
    eos_token_ids: frozenset[int],
) -> CompletionOutput:
    """A beam search's answer as the caller sees it.

    Args:
        index: Its place among the answers.
        found: The answer.
        detokenizer: One that has seen the prompt only.
        eos_token_ids: The model's own end tokens.
    """
    detokenizer.append(found.output_token_ids, ended_by_token=found.is_ended)
    detokenizer.finish()
    return CompletionOutput(
        index=index,
        text=detokenizer.text,
        token_ids=list(found.output_token_ids),
        cumulative_logprob=found.cumulative_logprob,
        finish_reason=FinishReason.STOP if found.is_ended else FinishReason.LENGTH,
        stop_reason=_stop_token(found.output_token_ids, eos_token_ids) if found.is_ended else None,
        score=found.score,
    )


def _stop_token(token_ids: SequenceOf[int], eos_token_ids: frozenset[int]) -> int | None:
    return None if token_ids[-1] in eos_token_ids else token_ids[-1]
