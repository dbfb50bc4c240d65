"""Outputs of the engine: answers and deltas, named as in vLLM where vLLM has the same class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jpaged.errors import ErrorInfo
from jpaged.observe.statistics import RequestMetrics

if TYPE_CHECKING:  # `jpaged --help` imports no numpy
    import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token that could have been chosen at one position.

    Attributes:
        logprob: Natural logarithm of the token's probability, or the value that the engine's
            `logprobs_mode` selects.
        rank: Rank in the whole vocabulary by `logprob`; 1 is the highest. For the chosen token, the
            number of tokens with at least its value, itself included.
        decoded_token: Text of the token alone; None without a tokenizer.
        kept_mass: Probability of the tokens that top-k, top-p and min-p kept at this position,
            after biases, penalties and temperature. Exactly 1 if they removed no token, and in
            greedy requests. Only chosen tokens have the value; other tokens and prompt tokens have
            None.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    kept_mass: float | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: Index of the answer among the answers to the prompt: the number of the sample, or
            the rank for a beam search and for `best_of` above `n`.
        text: Detokenized text so far. A matched stop string is removed unless
            `include_stop_str_in_output` is set. Until the answer ends, an incomplete character and
            a possible start of a stop string are left out.
        token_ids: All sampled tokens, including the tokens of a stop string and a stop token.
        cumulative_logprob: Sum of the tokens' `Logprob.logprob`. None unless the request set
            `logprobs`, or ranks its answers (`best_of` above `n`, or `beam_width`).
        logprobs: For each token, the log-probabilities of the top tokens and of the chosen token,
            by token id; None unless requested. The entries are created when they are first read.
        finish_reason: "stop", "length", "abort" or "error"; None until the answer ends.
        stop_reason: Stop string or stop token id that ended the answer; None if the model's end
            token or another cause ended the answer.
        score: Score that ranks the answers of a beam search: `cumulative_logprob` divided by the
            number of tokens to the power `length_penalty`. None for a sample.
        weight_versions: Pairs (version, index in `token_ids` of the first token that the weights of
            this version made). See `Engine.update_weights`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    weight_versions: tuple[tuple[int, int], ...] = ()

    @property
    def token_logprobs(self) -> "np.ndarray | None":
        """`Logprob.logprob` of each token in `token_ids`, float32 [T]; None unless `logprobs` were
        requested.

        For trainers: reading this array does not create the entries of `logprobs`. Do not write to
        the array.
        """
        if self.logprobs is None:
            return None
        # `logprobs` is a list if this object was copied or pickled.
        packed = getattr(self.logprobs, "token_logprobs", None)
        if packed is not None:
            return packed
        import numpy as np

        entries = zip(self.token_ids, self.logprobs, strict=True)
        return np.array([entry[token_id].logprob for token_id, entry in entries], np.float32)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request with all of its output so far.

    Attributes:
        request_id: Id of the request, as passed to or returned by `add_request`.
        prompt: Text of the prompt; None if the prompt was given as token ids.
        prompt_token_ids: Tokens of the prompt.
        prompt_logprobs: For each prompt token, the log-probabilities of the top tokens and of the
            prompt's own token, by token id; None unless requested. The first entry is None, since
            no token precedes the first token. The entries are created when they are first read.
        outputs: The `n` answers in the order of the samples, including unfinished answers. With
            `best_of` above `n`: the `n` samples that are best so far, best first. For a beam
            search: the `n` best answers, best first, or fewer if too few tokens have a finite
            log-probability. The list is empty until the search ends, and if it is aborted or fails.
        finished: Whether all answers are complete.
        num_cached_tokens: Number of prompt tokens whose KV came from the prefix cache when the
            request first joined the batch.
        metrics: Times of the request's events.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class CompletionScore:
    """Log-probabilities of the tokens of one completion, as returned by `Engine.score_completions`.

    Attributes:
        token_ids: Tokens of the completion.
        logprobs: Natural logarithm of each token's probability after the prompt and the tokens
            before it, from the unchanged logits.
        is_greedy: For each token, whether no other token is more probable at its position.
        num_cached_tokens: Number of prompt tokens whose KV came from the prefix cache.
        weights_version: Version of the weights; see `Engine.update_weights`.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: list[bool]
    num_cached_tokens: int = 0
    weights_version: int = 0

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities: the log-probability of the whole completion."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and tokens of an answer since its previous delta; `Engine.stream` yields deltas.

    The texts of all deltas, joined in order, are the answer's final `CompletionOutput.text`. The
    tokens of all deltas are the answer's final `token_ids`. `print(delta, end="")` prints the text.
    A delta may have tokens without text, because an incomplete character and a possible start of a
    stop string are held back.

    Attributes:
        text: New text.
        token_ids: New tokens.
        finish_reason: "stop", "length", "abort" or "error" in the last delta; None before.
        stop_reason: Stop string or stop token id that ended the answer, in the last delta only.
        logprobs: For each new token, the log-probabilities of the top tokens and of the chosen
            token, by token id; None unless requested.
        request_id: Id of the request.
        index: Index of the answer, as in `CompletionOutput`.
        weight_versions: As in `CompletionOutput`, with indices in the `token_ids` of this delta.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    request_id: str = ""
    index: int = 0
    weight_versions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, request_id: str, answer: CompletionOutput) -> "TextDelta":
        """Return one delta that contains a whole answer."""
        return cls(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=None if answer.logprobs is None else list(answer.logprobs),
            request_id=request_id,
            index=answer.index,
            weight_versions=answer.weight_versions,
        )

    def __str__(self) -> str:
        return self.text

    @property
    def finished(self) -> bool:
        """Whether this delta is the last delta of the answer."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """New output of a request since its previous delta, as returned by `Engine.take_deltas`.

    Attributes:
        request_id: Id of the request.
        deltas: New output, at most one delta per answer. A beam search, and a request with
            `best_of` above `n`, returns whole answers in its last delta, best first.
        finished: Whether all answers are complete. If true, this delta is the request's last.
        prompt_logprobs: As in `RequestOutput`. Set in one delta only, at the latest in the delta of
            the first output token.
        num_cached_tokens: As in `RequestOutput`.
        metrics: Times of the request's events; None until the request is finished.
        error: Message of the error that ended the request; None unless the request failed.
        error_info: Parts of `error`; None unless `error` is from a `RequestError`.
    """

    request_id: str
    deltas: list[TextDelta]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_info: ErrorInfo | None = None
