"""What a request asks of the sampler: `SamplingParams`, checked when it is made.

The names and defaults are vLLM's, since users know them. Nothing here imports JAX.
"""

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, no_type_check

MAX_LOGPROBS = 20
"""The most log-probabilities a token that an engine gives unless it is told otherwise."""

_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


@no_type_check  # it checks itself, with messages for people: `temperature=0` is as good as 0.0
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        n: completions of the prompt; only 1 for now.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: keep the smallest set of tokens whose probabilities sum to this; 1 keeps all.
        top_k: keep this many of the most probable tokens; 0 or -1 keeps all.
        min_p: keep the tokens at least this fraction as probable as the most probable one.
        repetition_penalty: above 1 discourages tokens seen in the prompt or the output.
        presence_penalty: taken off the logit of every token that the output has.
        frequency_penalty: taken off once for each time the output has the token.
        seed: a 64-bit integer; the same seed gives the same tokens whatever else runs.
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
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all; without it only token ids come back.

    Raises:
        TypeError, ValueError: naming the parameter, its value and what it may be.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Collection[str] | None = None
    stop_token_ids: Collection[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_choice()
        self._check_length()
        self._check_stops()
        self._check_tokens()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
        ):
            _check_bool(name, getattr(self, name))

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
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of tokens are wanted, by the caller or for a ranking."""
        return self.logprobs is not None or bool(self.best_of or self.beam_width)

    @property
    def adjusts_logits(self) -> bool:
        """Whether the logits change before the temperature: penalties, biases, forbidden tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
        )

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def validate_for(
        self,
        vocab_size: int,
        max_logprobs: int = MAX_LOGPROBS,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Checks what depends on the model and the engine.

        Args:
            vocab_size: the width of the logits, V.
            max_logprobs: the most log-probabilities the engine gives a token.
            eos_token_ids: the model's own end tokens.

        Raises:
            ValueError: naming the parameter, its value and what it may be.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            _check_ids_below(name, getattr(self, name) or (), vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise ValueError(
                    f"{name}={value} is more than this engine's max_logprobs={max_logprobs}: "
                    f"ask for at most {max_logprobs}"
                )
        self._check_leaves_a_token(eos_token_ids)

    def first_forbidden_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """The tokens that may not be chosen until there are `min_tokens` of output."""
        if not self.min_tokens:
            return frozenset()
        return self.ending_ids(eos_token_ids)

    def ending_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """The tokens that end the output: stop_token_ids and, unless ignored, the model's own."""
        own = () if self.ignore_eos else eos_token_ids
        return frozenset(self.stop_token_ids or ()) | frozenset(own)

    def _check_leaves_a_token(self, eos_token_ids: Collection[int]) -> None:
        if self.allowed_token_ids is None:
            return
        if not set(self.allowed_token_ids) - self.first_forbidden_ids(eos_token_ids):
            raise ValueError(
                f"min_tokens={self.min_tokens} forbids every one of the allowed_token_ids="
                f"{list(self.allowed_token_ids)}, which all end the output: allow another token "
                "or leave min_tokens at 0"
            )

    def _check_choice(self) -> None:
        _check_int("n", self.n, low=1)
        if self.n > 1:
            raise ValueError(
                f"n={self.n} is not supported yet (it comes with block sharing): leave n at 1 "
                "and add the prompt as many times as you need"
            )
        _check_float("temperature", self.temperature, "at least 0", low=0.0)
        _check_float("top_p", self.top_p, "above 0 and at most 1", above=0.0, high=1.0)
        _check_int("top_k", self.top_k, low=-1, hint="a count, or 0 or -1 to keep all tokens")
        _check_float("min_p", self.min_p, "from 0 to 1", low=0.0, high=1.0)
        _check_float("repetition_penalty", self.repetition_penalty, "above 0", above=0.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), "from -2 to 2", low=-2.0, high=2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=_MIN_SEED, high=_MAX_SEED, hint="a 64-bit integer")

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
                "lower min_tokens or raise max_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0)

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple | set | frozenset | None):
            raise TypeError(f"stop={self.stop!r} must be a string or a list of strings")
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop={self.stop!r} must hold strings only, not {text!r}")
            if not text:
                raise ValueError(f"stop={self.stop!r} has an empty string: leave it out")
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r} needs the text: leave detokenize on or use stop_token_ids"
            )

    def _check_tokens(self) -> None:
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError(
                "allowed_token_ids=[] allows no token at all: name some, or pass None for all"
            )
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        _check_ids("logit_bias", list(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            name = f"logit_bias[{token_id}]"
            _check_float(name, bias, "from -100 to 100", low=-100.0, high=100.0)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")


def _check_int(
    name: str, value: object, *, low: int, high: int | None = None, hint: str = ""
) -> None:
    hint = hint or f"an integer, {low} or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: it must be {hint}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value} is out of range: it must be {hint}")


def _check_float(
    name: str,
    value: object,
    hint: str,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r} is a {kind}: it must be a number {hint}")
    number = _as_float(value)
    if not math.isfinite(number) or not low <= number <= high or number <= above:
        raise ValueError(f"{name}={value} is out of range: it must be a number {hint}")


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_ids(name: str, ids: object) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple | set | frozenset):
        raise TypeError(f"{name}={ids!r} must be a list of token ids")
    for token_id in ids:
        _check_int(f"token id in {name}", token_id, low=0, hint="an integer, 0 or more")


def _check_ids_below(name: str, ids: Collection[int], vocab_size: int) -> None:
    unknown = sorted(token_id for token_id in ids if token_id >= vocab_size)
    if unknown:
        raise ValueError(
            f"{name} names token ids {unknown[:5]} that the model does not have: "
            f"ids go from 0 to {vocab_size - 1}"
        )
