"""`SamplingParams`: the sampling parameters of a request, checked when they are created.

The names and defaults are vLLM's, because users know them. This module does not import JAX.
"""

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from jpaged.errors import RequestError, RequestTypeError
from jpaged.options import Options, check_float, check_int, integer, number, option, switch
from jpaged.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""Default maximum of `logprobs` and `prompt_logprobs`, per token."""

_MAX_SERVED_SEQUENCES = 2**16
"""Maximum number of answers or beams in the schema of the HTTP API. The limit of an engine,
`max_num_seqs`, is lower."""

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
"""Parameters that a beam search cannot use, with the neutral values that a beam search accepts. An
error recommends the first value."""


def _check_early_stopping(name: str, value: object) -> None:
    if not isinstance(value, bool) and value != "never":
        raise RequestError(name, 'must be False, True or "never"', value=repr(value))


def _check_stop(name: str, value: object) -> None:
    if not isinstance(value, str | list | tuple | set | frozenset | None):
        raise RequestTypeError(name, "must be a string or a list of strings", value=repr(value))
    for text in (value,) if isinstance(value, str) else value or ():
        if not isinstance(text, str):
            raise RequestTypeError(
                name, f"must contain strings only, not {text!r}", value=repr(value)
            )
        if not text:
            raise RequestError(
                name, "has an empty string", value=repr(value), remedy="remove the empty string"
            )


def _check_token_ids(name: str, ids: object) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple | set | frozenset):
        raise RequestTypeError(name, "must be a list of token ids", value=repr(ids))
    if set(map(type, ids)) <= {int} and (not ids or min(ids) >= 0):  # fast, without a Python loop
        return
    for token_id in ids:
        check_int(f"token id in {name}", token_id, low=0, requirement="an integer, 0 or more")


def _check_allowed_ids(name: str, ids: object) -> None:
    _check_token_ids(name, ids)
    if ids is not None and not ids:
        raise RequestError(
            name, "allows no token", value="[]", remedy="pass at least one, or None for all tokens"
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
    """Raise RequestError if a token id is not below `vocab_size`."""
    if ids and max(ids) >= vocab_size:
        unknown = heapq.nsmallest(5, (token_id for token_id in ids if token_id >= vocab_size))
        raise RequestError(
            name,
            f"has token ids {unknown}, which the model does not have",
            remedy=f"use ids from 0 to {vocab_size - 1}",
        )


def _check_structured_outputs(name: str, value: object) -> None:
    if value is not None and not isinstance(value, StructuredOutputs):
        raise RequestTypeError(
            name, "must be a StructuredOutputs or None", value=_format_value(value)
        )


def _format_value(value: object) -> str:
    """Return the `repr` of a value, or only the length of a long collection."""
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) > 20:
        return f"({len(value)} values)"
    return repr(value)


# `Options` checks the types. A runtime type checker would reject `temperature=0`, an int.
@no_type_check
@dataclass(frozen=True)
class SamplingParams(Options, group="how tokens are chosen"):
    """Parameters that control how the tokens of a request are chosen, and when an answer ends.

    Args:
        n: Number of answers. The answers are independent samples, returned in order. Sample i has
            the seed `seed + i` (modulo 2**64), and equals the answer to a request with `n=1` and
            that seed. With `beam_width`, or `best_of` above `n`: the `n` best answers, best first.
        best_of: Number of samples. The `n` samples with the highest cumulative log-probability are
            returned, best first. None or `n`: all samples are returned, in order.
        beam_width: Number of beams of a beam search, which replaces sampling and ignores the seed.
            The search equals `generate(num_beams=...)` of Hugging Face transformers. The width plus
            the number of end and stop tokens may not exceed 20.
        length_penalty: Exponent of the length in a beam's score: the cumulative log-probability
            divided by the number of tokens to this power. Above 0 favours long answers, below 0
            short answers.
        early_stopping: When a beam search with `beam_width` complete answers stops. True:
            immediately. False: when no beam, scored at its current length, beats the worst answer.
            "never": when no beam can beat the worst answer at any length.
        temperature: Divisor of the logits; 0 chooses the most probable token.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this value; 1
            keeps all tokens.
        top_k: Number of most probable tokens to keep; 0 or -1 keeps all tokens.
        min_p: Keep the tokens whose probability is at least this fraction of the highest
            probability.
        repetition_penalty: Factor above 1 that makes tokens of the prompt and the output less
            probable; below 1 makes them more probable.
        presence_penalty: Number subtracted from the logit of each token that occurs in the output.
        frequency_penalty: Number subtracted from the logit of a token for each time that the token
            occurs in the output.
        seed: 64-bit integer that determines the random draws of the first sample, regardless of
            other requests; see `n`. None: the engine chooses a seed.
        stop: String, or strings, that end the text.
        stop_token_ids: Token ids that end the answer.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Continue after the model's end token.
        max_tokens: Maximum number of output tokens; None allows as many as `max_model_len` does.
        min_tokens: Number of output tokens before which end tokens cannot be chosen and stop
            strings are ignored.
        logprobs: For each output token, return the log-probabilities of this many most probable
            tokens, and of the chosen token. None returns no log-probabilities. The engine's
            `logprobs_mode` chooses the values.
        prompt_logprobs: As `logprobs`, for each prompt token, without regard to `logprobs_mode`.
        logit_bias: Number from -100 to 100 to add to the logit of a token, by token id.
        allowed_token_ids: The only tokens that may be chosen; None allows all tokens.
        structured_outputs: Structured-output specification that the answer must match, such as a
            JSON schema. The answer ends when the specification allows no further token; with
            `ignore_eos`, only then. Log-probabilities are relative to the allowed tokens.
        skip_special_tokens: Omit special tokens from the text.
        detokenize: Return text. False: only token ids are returned.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the parameter, its value and
            the valid values.
    """

    n: int = integer(
        1, low=1, server_max=_MAX_SERVED_SEQUENCES, help="number of answers; stderr names each"
    )
    best_of: int | None = integer(
        None,
        low=1,
        server_max=_MAX_SERVED_SEQUENCES,
        metavar="M",
        help="number of samples, of which the N most probable are printed",
    )
    beam_width: int | None = integer(
        None,
        low=1,
        server_max=_MAX_SERVED_SEQUENCES,
        metavar="K",
        help="number of beams of a beam search, which prints the N best answers",
    )
    length_penalty: float = number(
        1.0, metavar="A", help="exponent of the length by which a beam's score is divided"
    )
    early_stopping: bool | Literal["never"] = option(
        False,
        _check_early_stopping,
        help="end the beam search at the K-th complete answer",
        default_text="",
    )
    temperature: float = number(
        1.0, low=0, metavar="T", help="divisor of the logits; 0: choose the most probable token"
    )
    top_p: float = number(
        1.0,
        above=0,
        high=1,
        metavar="P",
        help="keep the most probable tokens whose probabilities sum to P",
    )
    top_k: int = integer(
        0,
        low=-1,
        requirement="a number of tokens, or 0 or -1 to keep all tokens",
        metavar="K",
        help="keep the K most probable tokens; 0: all",
    )
    min_p: float = number(
        0.0,
        low=0,
        high=1,
        metavar="P",
        help="keep tokens that are at least P times as probable as the top token",
    )
    repetition_penalty: float = number(
        1.0,
        above=0,
        metavar="R",
        help="above 1: make tokens of the prompt and the answer less probable",
    )
    presence_penalty: float = number(
        0.0,
        low=-2,
        high=2,
        metavar="R",
        help="number subtracted from the logit of each token in the answer",
    )
    frequency_penalty: float = number(
        0.0,
        low=-2,
        high=2,
        metavar="R",
        help="number subtracted from the logit of a token for each time the answer has the token",
    )
    seed: int | None = integer(
        None,
        low=-(2**63),
        high=2**64 - 1,
        requirement="a 64-bit integer",
        help="seed of the random draws; the same seed gives the same draws",
    )
    stop: str | Collection[str] | None = option(
        None,
        _check_stop,
        metavar="TEXT",
        action="append",
        help="end the answer before TEXT; may be repeated",
    )
    stop_token_ids: Collection[int] | None = option(None, _check_token_ids)
    include_stop_str_in_output: bool = switch(False)
    ignore_eos: bool = switch(False, help="continue after the model's end token")
    max_tokens: int | None = integer(
        16, low=1, allow_none=True, help="maximum number of tokens in an answer"
    )
    min_tokens: int = integer(0, low=0, help="minimum number of tokens in an answer")
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
                "cannot be found without text",
                value=repr(self.stop),
                remedy="set detokenize=True, or use stop_token_ids",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty if there are none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_samples(self) -> int:
        """Number of sequences to sample, including samples that are not returned."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether the engine draws more than `n` samples, and returns the `n` most probable."""
        return self.num_samples > self.n

    @property
    def ranks_by_logprobs(self) -> bool:
        """Whether log-probabilities rank the samples or the beams."""
        return self.is_ranked or self.beam_width is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether the engine must compute log-probabilities of the tokens, to return them to the
        caller or to rank samples or beams."""
        return self.logprobs is not None or self.ranks_by_logprobs

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties, biases or forbidden tokens change the logits before temperature."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or self.biases_logits
        )

    @property
    def biases_logits(self) -> bool:
        """Whether `logit_bias` or `allowed_token_ids` changes the logits of every output token."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def validate_for(
        self,
        vocab_size: int,
        max_logprobs: int = MAX_LOGPROBS,
        eos_token_ids: Collection[int] = (),
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        """Check the parameters against the limits of a model and an engine.

        Args:
            vocab_size: Width V of the logits.
            max_logprobs: Maximum number of log-probabilities per token that the engine returns.
            eos_token_ids: End tokens of the model.
            max_num_seqs: Maximum number of sequences in a step; None for no bound.
            max_model_len: Maximum number of tokens of a sequence; None for no bound.
            logprobs_mode: Values that the engine reports (`jpaged.config.LogprobsMode`).

        Raises:
            ValueError: A parameter exceeds a limit. The message names the parameter, its value and
                the limit.
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
        if self.is_ranked and self.logprobs is not None and logprobs_mode.endswith("logits"):
            raise RequestError(
                "logprobs",
                f"cannot be combined with best_of={self.best_of} and "
                f"logprobs_mode={logprobs_mode!r}, because best_of ranks the answers by "
                "log-probabilities",
                value=f"{self.logprobs}",
                remedy="omit logprobs or best_of, or create the engine with "
                "logprobs_mode='raw_logprobs'",
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
                remedy="lower min_tokens",
            )

    @property
    def is_streamable(self) -> bool:
        """Whether answers can be streamed. Ranked samples and beams are chosen only at the end."""
        return self.beam_width is None and not self.is_ranked

    def check_streamable(self) -> None:
        """Raise RequestError if the answers cannot be streamed; see `is_streamable`."""
        remedy = "use generate, or add_request and step, which return whole answers"
        if self.beam_width is not None:
            raise RequestError(
                "beam_width",
                "cannot be streamed, because a search has no answers until its end",
                value=f"{self.beam_width}",
                remedy=remedy,
            )
        if not self.is_streamable:
            raise RequestError(
                "best_of",
                f"above n={self.n} cannot be streamed, because samples are ranked only at the end",
                value=f"{self.best_of}",
                remedy=remedy,
            )

    def first_forbidden_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """Return the tokens that may not be chosen before the output has `min_tokens` tokens.

        Args:
            eos_token_ids: End tokens of the model.
        """
        if not self.min_tokens:
            return frozenset()
        return self.ending_ids(eos_token_ids)

    def ending_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """Return the tokens that end the output.

        Args:
            eos_token_ids: End tokens of the model, which are left out if `ignore_eos` is set.
        """
        own = () if self.ignore_eos else eos_token_ids
        return frozenset(self.stop_token_ids or ()) | frozenset(own)

    def names_that_forbid_all(
        self, token_ids: Collection[int], num_output_tokens: int, eos_token_ids: Collection[int]
    ) -> list[str]:
        """Return the names of the parameters that together forbid all of `token_ids`.

        Args:
            token_ids: Tokens that other constraints, such as a grammar, allow.
            num_output_tokens: Current number of output tokens.
            eos_token_ids: End tokens of the model.

        Returns:
            The names of the parameters, or an empty list if at least one token is allowed or
            `token_ids` is empty.
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
                remedy="raise best_of or lower n, because n of the best_of samples are returned",
            )
        if self.temperature == 0 and self.beam_width is None and self.num_samples > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                name,
                "with temperature=0 gives the same answer each time",
                value=f"{self.num_samples}",
                remedy=f"leave {name} at 1, raise temperature, or use beam_width",
            )

    def _check_beams(self) -> None:
        """Check that the parameters suit a beam search, or suit sampling if `beam_width` is None.

        Raises:
            RequestError: A parameter does not apply, or `n` exceeds `beam_width`.
        """
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise RequestError(
                        name,
                        "is for beam search only",
                        value=repr(getattr(self, name)),
                        remedy=f"set beam_width, or leave {name} at {default}",
                    )
            return
        if self.n > self.beam_width:
            raise RequestError(
                "n",
                (
                    f"is more than beam_width={self.beam_width}, the number of answers that a "
                    "beam search finds"
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
                        f"cannot be combined with beam_width={self.beam_width}, because a beam "
                        "search does not sample"
                    ),
                    value=_format_value(value),
                    remedy=f"leave {name} at {accepted_values[0]}, or omit beam_width",
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
            f"forbids every one of {tokens_text}, because all of them end the output",
            value=f"{self.min_tokens}",
            remedy="allow a token that does not end the output, or leave min_tokens at 0",
        )

    def _check_fits_batch(self, max_num_seqs: int) -> None:
        """Raise RequestError if the request's sequences do not fit in one batch together."""
        set_names = (name for name in ("beam_width", "best_of") if getattr(self, name) is not None)
        name = next(set_names, "n")
        count = getattr(self, name)
        if count > max_num_seqs:
            raise RequestError(
                name,
                f"sequences must run in one batch, which has at most max_num_seqs={max_num_seqs}",
                value=f"{count}",
                remedy=f"lower {name}, or create the engine with max_num_seqs={count}",
            )

    def _check_candidates(self, max_logprobs: int, eos_token_ids: Collection[int]) -> None:
        """Raise RequestError if the engine returns too few next tokens per beam for a beam search.

        The engine returns the `max_logprobs` most probable next tokens of each beam. A beam search
        is exact only if at least `beam_width` of these tokens continue the output. In the worst
        case, the returned tokens include every token that ends the output.
        """
        num_endings = len(self.ending_ids(eos_token_ids))
        limit = max_logprobs - num_endings
        if (self.beam_width or 0) > limit:
            remedy = "lower beam_width" if limit > 0 else "pass fewer stop_token_ids"
            remedy += "" if self.ignore_eos else ", or set ignore_eos=True"
            raise RequestError(
                "beam_width",
                (
                    f"is more than {max(limit, 0)}. The search needs {self.beam_width} next tokens "
                    f"that continue a beam, but the engine returns only {max_logprobs} next tokens "
                    f"per beam, and {num_endings} of the returned tokens may end the output"
                ),
                value=f"{self.beam_width}",
                remedy=remedy,
            )
