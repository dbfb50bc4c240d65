"""What comes out of the engine; names and meanings are vLLM's where it has them."""

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.errors import ErrorInfo
from jpaged.observe.statistics import RequestMetrics


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one candidate for a token.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 for the likeliest token, counted over the whole vocabulary.
        decoded_token: Its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: Its place among the answers to the same prompt: the sample's number, or with
            `best_of` above n and beam search its rank.
        text: The detokenised answer so far, without a matched stop string (unless
            `include_stop_str_in_output`); while the answer grows, text that may be the start of
            a stop string or an incomplete character is missing.
        token_ids: Every sampled token, those of a stop string or a stop token included.
        cumulative_logprob: Sum of the tokens' log probabilities, if `logprobs` were asked for or
            the answers are ranked (`best_of` above n, `beam_width`).
        logprobs: For each token its candidates by token id, if asked for: a sequence whose entries
            are made when it is first read.
        finish_reason: "stop", "length", "abort" or "error"; None while it grows.
        stop_reason: The stop string or stop token id that ended it; None for the end-of-text
            token or another reason.
        score: Of an answer of a beam search: cumulative_logprob over the number of tokens to the
            power of `length_penalty`, by which the answers are ranked.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and what has come of it so far.

    Attributes:
        request_id: The id given to, or by, `add_request`.
        prompt: The prompt's text; None if it came as token ids.
        prompt_token_ids: The prompt's tokens.
        prompt_logprobs: For each prompt token its candidates by token id (None for the first,
            which nothing predicts), if asked for.
        outputs: The n answers in the order of their samples, unfinished ones too. With `best_of`
            above n the n best samples, best first: while they grow, those that are best so far. Of
            a beam search the n best answers, best first (fewer if the vocabulary has no more); none
            before its end, if it was aborted, or if it failed.
        finished: Whether all answers are finished.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache when the request first
            joined the batch.
        metrics: When things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What `Engine.stream` yields: the growth of an answer since the delta before it.

    The texts of all deltas of an answer, joined, are its final `CompletionOutput.text`; likewise
    the token ids. `print(delta, end="")` prints the text. The text can be empty while tokens came:
    an incomplete character and a possible start of a stop string are held back.

    Attributes:
        text: The new text.
        token_ids: The new tokens.
        finish_reason: Set on the last delta: "stop", "length", "abort" or "error".
        stop_reason: As in `CompletionOutput`, on the last delta.
        logprobs: For each new token its candidates by token id, if asked for.
        request_id: Whose answer it is.
        index: Which of the request's answers: the sample's number.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    request_id: str = ""
    index: int = 0

    @classmethod
    def of(cls, request_id: str, answer: CompletionOutput) -> "TextDelta":
        """A whole answer."""
        return cls(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=None if answer.logprobs is None else list(answer.logprobs),
            request_id=request_id,
            index=answer.index,
        )

    def __str__(self) -> str:
        return self.text

    @property
    def finished(self) -> bool:
        """Whether this is the answer's last delta."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What `Engine.take_deltas` gives: the growth of a request since the one before it.

    Attributes:
        request_id: Whose it is.
        deltas: What its answers grew by, at most one each. Which answers a beam search or a
            `best_of` above n returns is known only at its end: then they come whole, best first.
        finished: Whether all answers are finished; nothing of the request follows.
        prompt_logprobs: As in `RequestOutput`, once, not later than the first output token.
        num_cached_tokens: As in `RequestOutput`.
        metrics: When things happened, of one that is finished.
        error: Why the request failed, of one that ended with finish_reason "error".
        error_info: The parts of `error`; None if the engine is at fault.
    """

    request_id: str
    deltas: list[TextDelta]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_info: ErrorInfo | None = None
