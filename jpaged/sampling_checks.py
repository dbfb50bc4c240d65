"""The checks behind `SamplingParams`: each error names the parameter, its value and the remedy."""

import heapq
import math
import numbers
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.sampling_params import SamplingParams

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1

_NOT_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
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
}
"""What a beam search has no use for, and the values that ask nothing of it; the first is told."""


def check_choice(params: "SamplingParams") -> None:
    """How a token is chosen."""
    check_float("temperature", params.temperature, "at least 0", low=0.0)
    check_float("top_p", params.top_p, "above 0 and at most 1", above=0.0, high=1.0)
    check_int("top_k", params.top_k, low=-1, hint="a count, or 0 or -1 to keep all tokens")
    check_float("min_p", params.min_p, "from 0 to 1", low=0.0, high=1.0)
    check_float("repetition_penalty", params.repetition_penalty, "above 0", above=0.0)
    for name in ("presence_penalty", "frequency_penalty"):
        check_float(name, getattr(params, name), "from -2 to 2", low=-2.0, high=2.0)
    if params.seed is not None:
        check_int("seed", params.seed, low=MIN_SEED, high=MAX_SEED, hint="a 64-bit integer")


def check_samples(params: "SamplingParams") -> None:
    """How many sequences are sampled; after `check_choice`."""
    if params.beam_width is not None:
        check_int("beam_width", params.beam_width, low=1)
    check_int("n", params.n, low=1)
    if params.best_of is not None:
        check_int("best_of", params.best_of, low=1)
        if params.best_of < params.n:
            raise ValueError(
                f"best_of={params.best_of} is less than n={params.n}: the n returned are taken "
                "from best_of samples, so raise best_of or lower n"
            )
    if params.temperature == 0 and params.beam_width is None and params.num_samples > 1:
        name = "n" if params.best_of is None else "best_of"
        raise ValueError(
            f"{name}={params.num_samples} with temperature=0 gives the same answer each time: "
            f"leave {name} at 1, raise temperature, or search with beam_width"
        )


def check_beam(params: "SamplingParams") -> None:
    """What a beam search takes, and what is its alone; after the other checks."""
    check_float("length_penalty", params.length_penalty, "but neither NaN nor infinite")
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise ValueError(f'early_stopping={params.early_stopping!r} must be False, True or "never"')
    if params.beam_width is None:
        _check_no_search(params)
        return
    if params.n > params.beam_width:
        raise ValueError(
            f"n={params.n} is more than beam_width={params.beam_width}, which is how many answers "
            "a search has: lower n or raise beam_width"
        )
    for name, unset in _NOT_FOR_BEAMS.items():
        value = getattr(params, name)
        if not any(value == each for each in unset):
            raise ValueError(
                f"{name}={_shown(value)} cannot go with beam_width={params.beam_width}, for a "
                f"search takes the most probable answers: leave {name} at {unset[0]}, or sample "
                "without beam_width"
            )


def _check_no_search(params: "SamplingParams") -> None:
    for name, unset in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != unset:
            raise ValueError(
                f"{name}={getattr(params, name)!r} is for beam search: set beam_width, or leave "
                f"{name} at {unset}"
            )


def check_length(params: "SamplingParams") -> None:
    """How many tokens there may be, and what is told of each."""
    if params.max_tokens is not None:
        check_int("max_tokens", params.max_tokens, low=1)
    check_int("min_tokens", params.min_tokens, low=0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}: "
            "lower min_tokens or raise max_tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            check_int(name, getattr(params, name), low=0)


def check_stops(params: "SamplingParams") -> None:
    """The stop strings."""
    if not isinstance(params.stop, str | list | tuple | set | frozenset | None):
        raise TypeError(f"stop={params.stop!r} must be a string or a list of strings")
    for text in params.stop_strings:
        if not isinstance(text, str):
            raise TypeError(f"stop={params.stop!r} must hold strings only, not {text!r}")
        if not text:
            raise ValueError(f"stop={params.stop!r} has an empty string: leave it out")
    if params.stop_strings and not params.detokenize:
        raise ValueError(
            f"stop={params.stop!r} needs the text: leave detokenize on or use stop_token_ids"
        )


def check_tokens(params: "SamplingParams") -> None:
    """The parameters that name tokens."""
    _check_ids("stop_token_ids", params.stop_token_ids)
    _check_ids("allowed_token_ids", params.allowed_token_ids)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError(
            "allowed_token_ids=[] allows no token at all: name some, or pass None for all"
        )
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, Mapping):
        raise TypeError(f"logit_bias={params.logit_bias!r} must map token ids to numbers")
    _check_ids("logit_bias", list(params.logit_bias))
    for token_id, bias in params.logit_bias.items():
        name = f"logit_bias[{token_id}]"
        check_float(name, bias, "from -100 to 100", low=-100.0, high=100.0)


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, hint: str = ""
) -> None:
    """Raise TypeError unless it is an integer (no bool), ValueError unless within the bounds."""
    hint = hint or f"an integer, {low} or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: it must be {hint}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value} is out of range: it must be {hint}")


def check_float(
    name: str,
    value: object,
    hint: str,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> None:
    """Raise TypeError unless it is a number, ValueError unless finite and within the bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r} is a {kind}: it must be a number {hint}")
    number = _as_float(value)
    if not math.isfinite(number) or not low <= number <= high or number <= above:
        raise ValueError(f"{name}={value} is out of range: it must be a number {hint}")


def check_ids_below(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError unless the model has these tokens."""
    if ids and max(ids) >= vocab_size:
        unknown = heapq.nsmallest(5, (token_id for token_id in ids if token_id >= vocab_size))
        raise ValueError(
            f"{name} names token ids {unknown} that the model does not have: "
            f"ids go from 0 to {vocab_size - 1}"
        )


def _shown(value: object) -> str:
    """As code, but of a long collection its length alone."""
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) > 20:
        return f"({len(value)} values)"
    return repr(value)


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
    if set(map(type, ids)) <= {int} and (not ids or min(ids) >= 0):  # in C for the usual case
        return
    for token_id in ids:
        check_int(f"token id in {name}", token_id, low=0, hint="an integer, 0 or more")
