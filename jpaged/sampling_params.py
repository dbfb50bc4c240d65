"""What a request asks of the sampler: `SamplingParams`, checked when it is made.

The names and defaults are vLLM's, since users know them. Nothing here imports JAX.
"""

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from jpaged.errors import RequestError, RequestTypeError
from jpaged.options import Options, check_float, check_int, integer, number, option, switch
from jpaged.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""The most log-probabilities a token that an engine gives unless it is told otherwise."""

_MAX_SERVED_SEQUENCES = 2**16
"""The most answers or beams that a server reads; what an engine takes is less, and its own."""

_MAX_LOGIT_BIAS = 100

_BEAM_SEARCH_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "stop": (None, [], (), set(), frozenset()),
    "logprobs": (None,),
    "structured_outputs": (None,),
}
"""What a beam search has no use for, and the values that ask nothing of it; the first is told."""


def _check_early_stopping(name: str, value: object) -> None:
    if not isinstance(value, bool) and value != "never":
        raise RequestError(name, 'must be False, True or "never"', value=repr(value))


def _check_stop(name: str, value: object) -> None:
    if not isinstance(value, str | list | tuple | set | frozenset | None):
        raise RequestTypeError(name, "must be a string or a list of strings", value=repr(value))
    for text in (value,) if isinstance(value, str) else value or ():
        if not isinstance(text, str):
            raise RequestTypeError(name, f"must hold strings only, not {text!r}", value=repr(value))
        if not text:
            raise RequestError(
                name, "has an empty string", value=repr(value), remedy="leave it out"
            )


def _check_token_ids(name: str, ids: object) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple | set | frozenset):
        raise RequestTypeError(name, "must be a list of token ids", value=repr(ids))
    if set(map(type, ids)) <= {int} and (not ids or min(ids) >= 0):  # in C for the usual case
        return
    for token_id in ids:
        check_int(f"token id in {name}", token_id, low=0, requirement="an integer, 0 or more")


def _check_allowed_ids(name: str, ids: object) -> None:
    _check_token_ids(name, ids)
    if ids is not None and not ids:
        raise RequestError(
            name, "allows no token at all", value="[]", remedy="name some, or pass None for all"
        )


def _check_logit_bias(name: str, biases: object) -> None:
    if biases is None:
        return
    if not isinstance(biases, Mapping):
        raise RequestTypeError(name, "must map token ids to numbers", value=repr(biases))
    _check_token_ids(name, list(biases))
    for token_id, bias in biases.items():
        check_float(
            f"{name}[{token_id}]",
            bias,
            "from -100 to 100",
            low=-_MAX_LOGIT_BIAS,
            high=_MAX_LOGIT_BIAS,
        )


def _check_ids_below(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError unless the model has these tokens."""
    if ids and max(ids) >= vocab_size:
        unknown = heapq.nsmallest(5, (token_id for token_id in ids if token_id >= vocab_size))
        raise RequestError(
            name,
            f"names token ids {unknown} that the model does not have",
            remedy=f"ids go from 0 to {vocab_size - 1}",
        )


def _check_structured_outputs(name: str, value: object) -> None:
    if value is not None and not isinstance(value, StructuredOutputs):
        raise RequestTypeError(name, "must be StructuredOutputs", value=_format_value(value))


def _format_value(value: object) -> str:
    """As code, but of a long collection its length alone."""
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) > 20:
        return f"({len(value)} values)"
    return repr(value)


@no_type_check  # it checks itself, with messages for people: `temperature=0` is as good as 0.0
@dataclass(frozen=True)
class SamplingParams(Options, group="how tokens are chosen"):
    """How the tokens of one request are chosen and when it ends.

    Args:
        n: answers to return. Each is a sample of its own, in the order of their numbers: sample i
            has the seed `seed + i` (modulo 2**64), so it is what a request of n=1 with that seed
            gives. With best_of above n, or beam_width: the best ones, best first.
        best_of: sample so many and return the n of the highest cumulative log-probability, best
            first; None or n samples n, and ranks none.
        beam_width: search for the most probable answers with so many beams, instead of sampling;
            the search is that of transformers' `generate(num_beams=...)`. It and the tokens that
            end an answer are at most 20 together. A seed has no effect on it.
        length_penalty: of beams: an answer's score is its cumulative log-probability divided by its
            number of tokens to this power; above 0 favours long answers, below 0 short ones.
        early_stopping: when a beam search with beam_width complete answers is over: True at once;
            False when no beam scores better at its present length; "never" when none can. But for
            True a search may go on to max_tokens to be sure.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: keep the smallest set of tokens whose probabilities sum to this; 1 keeps all.
        top_k: keep this many of the most probable tokens; 0 or -1 keeps all.
        min_p: keep the tokens at least this fraction as probable as the most probable one.
        repetition_penalty: above 1 discourages tokens seen in the prompt or the output.
        presence_penalty: taken off the logit of every token that the output has.
        frequency_penalty: taken off once for each time the output has the token.
        seed: a 64-bit integer; the same seed gives the same tokens whatever else runs. Of the
            first sample; see `n`.
        stop: a string or strings that end the text.
        stop_token_ids: tokens that end it.
        include_stop_str_in_output: leave the stop string in the text.
        ignore_eos: go on past the model's own end token.
        max_tokens: the most tokens to make; None goes on to the engine's max_model_len.
        min_tokens: no end token and no stop string counts before this many.
        logprobs: log-probabilities of this many top tokens (and the chosen one) a token.
        prompt_logprobs: likewise for every prompt token.
        logit_bias: token id to a value in [-100, 100] added to its logit.
        allowed_token_ids: no other token may be chosen.
        structured_outputs: what the answer must obey, such as a JSON schema. It ends as soon as
            nothing more may follow; where ignore_eos is set, only then. Log-probabilities are those
            among the tokens that may follow.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all; without it only token ids come back.

    Raises:
        TypeError, ValueError: naming the parameter, its value and what it may be.
    """

    n: int = integer(1, low=1, server_max=_MAX_SERVED_SEQUENCES, help="answers; stderr names each")
    best_of: int | None = integer(
        None,
        low=1,
        server_max=_MAX_SERVED_SEQUENCES,
        metavar="M",
        help="draw M samples, show the N likeliest",
    )
    beam_width: int | None = integer(
        None,
        low=1,
        server_max=_MAX_SERVED_SEQUENCES,
        metavar="K",
        help="search with K beams, show the N best",
    )
    length_penalty: float = number(
        1.0, metavar="A", help="power of its length that divides a beam's score"
    )
    early_stopping: bool | Literal["never"] = option(
        False, _check_early_stopping, help="end a search with its K-th answer", default_text=""
    )
    temperature: float = number(1.0, low=0, metavar="T", help="0: the likeliest tokens")
    top_p: float = number(
        1.0, above=0, high=1, metavar="P", help="keep the top tokens of this mass"
    )
    top_k: int = integer(
        0,
        low=-1,
        requirement="a count, or 0 or -1 to keep all tokens",
        metavar="K",
        help="keep the K likeliest; 0: all",
    )
    min_p: float = number(0.0, low=0, high=1, metavar="P", help="keep tokens over P x the top one")
    repetition_penalty: float = number(
        1.0, above=0, metavar="R", help="over 1: discourage tokens of prompt and answer"
    )
    presence_penalty: float = number(
        0.0,
        low=-2,
        high=2,
        metavar="R",
        help="number taken off the logit of each token that the answer has",
    )
    frequency_penalty: float = number(
        0.0,
        low=-2,
        high=2,
        metavar="R",
        help="number taken off a token's logit each time the answer has it",
    )
    seed: int | None = integer(
        None,
        low=-(2**63),
        high=2**64 - 1,
        requirement="a 64-bit integer",
        help="the same N gives the same answer",
    )
    stop: str | Collection[str] | None = option(
        None, _check_stop, metavar="TEXT", action="append", help="end before TEXT; may be repeated"
    )
    stop_token_ids: Collection[int] | None = option(None, _check_token_ids)
    include_stop_str_in_output: bool = switch(False)
    ignore_eos: bool = switch(False, help="go on past the model's end token")
    max_tokens: int | None = integer(16, low=1, allow_none=True, help="longest answer")
    min_tokens: int = integer(0, low=0, help="shortest answer")
    logprobs: int | None = integer(None, low=0, server_max=MAX_LOGPROBS)
    prompt_logprobs: int | None = integer(None, low=0, server_max=MAX_LOGPROBS)
    logit_bias: Mapping[int, float] | None = option(
        None, _check_logit_bias, low=-_MAX_LOGIT_BIAS, high=_MAX_LOGIT_BIAS
    )
    allowed_token_ids: Collection[int] | None = option(None, _check_allowed_ids)
    structured_outputs: StructuredOutputs | None = option(None, _check_structured_outputs)
    skip_special_tokens: bool = switch(True)
    detokenize: bool = switch(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_samples()
        self._check_beams()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens",
                f"is more than max_tokens={self.max_tokens}",
                value=f"{self.min_tokens}",
                remedy="lower min_tokens or raise max_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop",
                "needs the text",
                value=repr(self.stop),
                remedy="leave detokenize on or use stop_token_ids",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple: empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_samples(self) -> int:
        """Sequences that are sampled: those returned and those that rank below them."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether which samples are returned, and in which order, depends on their likelihood."""
        return self.num_samples > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of tokens are wanted, by the caller or for a ranking."""
        return self.logprobs is not None or self.is_ranked or self.beam_width is not None

    @property
    def adjusts_logits(self) -> bool:
        """Whether the logits change before the temperature: penalties, biases, forbidden tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or self.biases_logits
        )

    @property
    def biases_logits(self) -> bool:
        """Whether single tokens are favoured or forbidden from the start to the end."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def validate_for(
        self,
        vocab_size: int,
        max_logprobs: int = MAX_LOGPROBS,
        eos_token_ids: Collection[int] = (),
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Checks what depends on the model and the engine.

        Args:
            vocab_size: the width of the logits, V.
            max_logprobs: the most log-probabilities the engine gives a token.
            eos_token_ids: the model's own end tokens.
            max_num_seqs: the most sequences of a step; None for no bound.
            max_model_len: the most tokens of a sequence; None for no bound.

        Raises:
            ValueError: naming the parameter, its value and what it may be.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            _check_ids_below(name, getattr(self, name) or (), vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise RequestError(
                    name,
                    f"is more than this engine's max_logprobs={max_logprobs}",
                    value=str(value),
                    remedy=f"ask for at most {max_logprobs}",
                )
        self._check_some_token_allowed(vocab_size, eos_token_ids)
        if self.beam_width is not None and vocab_size > max_logprobs:
            self._check_candidates(max_logprobs, eos_token_ids)
        if max_num_seqs is not None:
            self._check_fits_batch(max_num_seqs)
        limit = None if self.max_tokens is not None else max_model_len
        if limit is not None and self.min_tokens > limit:
            raise RequestError(
                "min_tokens",
                f"is more than max_model_len={limit}",
                value=f"{self.min_tokens}",
                remedy="lower it",
            )

    @property
    def is_streamable(self) -> bool:
        """Whether which answers are returned is known from the start."""
        return self.beam_width is None and not self.is_ranked

    def check_streamable(self) -> None:
        """Raises ValueError if which answers are returned is known only at the end."""
        remedy = "use generate, or add_request and step, which bring whole answers"
        if self.beam_width is not None:
            raise RequestError(
                "beam_width",
                "cannot be streamed, for no answer is known before the search is over",
                value=f"{self.beam_width}",
                remedy=remedy,
            )
        if not self.is_streamable:
            raise RequestError(
                "best_of",
                f"above n={self.n} cannot be streamed, for the best are known only at the end",
                value=f"{self.best_of}",
                remedy=remedy,
            )

    def first_forbidden_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """The tokens that may not be chosen until there are `min_tokens` of output."""
        if not self.min_tokens:
            return frozenset()
        return self.ending_ids(eos_token_ids)

    def ending_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """The tokens that end the output: stop_token_ids and, unless ignored, the model's own."""
        own = () if self.ignore_eos else eos_token_ids
        return frozenset(self.stop_token_ids or ()) | frozenset(own)

    def names_that_forbid_all(
        self, token_ids: Collection[int], num_output_tokens: int, eos_token_ids: Collection[int]
    ) -> list[str]:
        """Return the names of the parameters that together forbid every one of `token_ids`.

        Args:
            token_ids: The tokens that may be chosen otherwise.
            num_output_tokens: Tokens of the output before the choice.
            eos_token_ids: The model's own end tokens.

        Returns:
            An empty list if a token may be chosen, or `token_ids` is empty.
        """
        allowed = token_ids if self.allowed_token_ids is None else self.allowed_token_ids
        is_early = num_output_tokens < self.min_tokens
        early = self.first_forbidden_ids(eos_token_ids) if is_early else frozenset()
        left = set(token_ids)
        removed = {
            "allowed_token_ids": left - set(allowed),
            "min_tokens": left & early,
        }
        if left.difference(*removed.values()):
            return []
        return [name for name, ids in removed.items() if ids]

    def _check_samples(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                "best_of",
                f"is less than n={self.n}",
                value=f"{self.best_of}",
                remedy="the n returned are taken from best_of samples, so raise best_of or lower n",
            )
        if self.temperature == 0 and self.beam_width is None and self.num_samples > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                name,
                "with temperature=0 gives the same answer each time",
                value=f"{self.num_samples}",
                remedy=f"leave {name} at 1, raise temperature, or search with beam_width",
            )

    def _check_beams(self) -> None:
        """What a beam search takes, and what is its alone."""
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise RequestError(
                        name,
                        "is for beam search",
                        value=repr(getattr(self, name)),
                        remedy=f"set beam_width, or leave {name} at {default}",
                    )
            return
        if self.n > self.beam_width:
            raise RequestError(
                "n",
                (
                    f"is more than beam_width={self.beam_width}, which is how many answers a "
                    "search has"
                ),
                value=f"{self.n}",
                remedy="lower n or raise beam_width",
            )
        for name, accepted_values in _BEAM_SEARCH_VALUES.items():
            value = getattr(self, name)
            if not any(value == each for each in accepted_values):
                raise RequestError(
                    name,
                    (
                        f"cannot go with beam_width={self.beam_width}, for a search takes the "
                        "most probable answers"
                    ),
                    value=_format_value(value),
                    remedy=f"leave {name} at {accepted_values[0]}, or sample without beam_width",
                )

    def _check_some_token_allowed(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        ids = self.allowed_token_ids
        forbidden = self.first_forbidden_ids(eos_token_ids)
        if any(token_id not in forbidden for token_id in ids or range(vocab_size)):
            return
        tokens_text = f"the {vocab_size} tokens of the model"
        if ids is not None:
            tokens_text = f"the allowed_token_ids={list(ids)[:20]}"
        raise RequestError(
            "min_tokens",
            f"forbids every one of {tokens_text}, which all end the output",
            value=f"{self.min_tokens}",
            remedy="allow another token or leave min_tokens at 0",
        )

    def _check_fits_batch(self, max_num_seqs: int) -> None:
        """All sequences of a request run together or not at all."""
        set_names = (name for name in ("beam_width", "best_of") if getattr(self, name) is not None)
        name = next(set_names, "n")
        count = getattr(self, name)
        if count > max_num_seqs:
            raise RequestError(
                name,
                f"sequences run at once, and the engine has max_num_seqs={max_num_seqs}",
                value=f"{count}",
                remedy=f"lower {name} or make the engine with max_num_seqs={count}",
            )

    def _check_candidates(self, max_logprobs: int, eos_token_ids: Collection[int]) -> None:
        """Each beam must bring enough next tokens for an exact search; see `BeamSearch`."""
        num_endings = len(self.ending_ids(eos_token_ids))
        limit = max_logprobs - num_endings
        if (self.beam_width or 0) > limit:
            remedy = "lower beam_width" if self.ignore_eos else "lower it, or set ignore_eos=True"
            raise RequestError(
                "beam_width",
                (
                    f"is more than {limit}, the most with {num_endings} tokens that end an answer "
                    f"(together at most {max_logprobs})"
                ),
                value=f"{self.beam_width}",
                remedy=remedy,
            )
