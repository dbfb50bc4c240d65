"""Convert the prompts and parameters of a caller into checked requests."""

import itertools
from array import array
from collections.abc import Container, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from jpaged.core.beam import BeamSearch
from jpaged.core.request import Request, StopCriteria
from jpaged.engine.request_state import RequestState
from jpaged.errors import RequestError, RequestTypeError, format_count, short_repr
from jpaged.sampling_params import MAX_LOGPROBS, SamplingParams
from jpaged.structured_outputs.mask_client import MaskWorkerClient
from jpaged.text.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_PROMPT_DESCRIPTION = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


@dataclass(frozen=True, slots=True)
class NormalizedPrompt:
    """A checked prompt, which has a text, token ids, or both. No field is an empty string or list.

    Attributes:
        text: Text of the prompt. The text is tokenized only if `token_ids` is None.
        token_ids: Token ids of the prompt.
        cache_salt: Salt of the prefix cache. Only prompts with the same salt share cached prefixes;
            None counts as a salt.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def normalize_prompts(prompts: object, *, vocab_size: int | None = None) -> list[NormalizedPrompt]:
    """Convert one prompt or a list of prompts to a list of `NormalizedPrompt`.

    A list of integers is one prompt.

    Args:
        prompts: The prompt or prompts from the caller.
        vocab_size: Token ids must be less than `vocab_size`; None for no upper limit.

    Raises:
        TypeError: A value is not a prompt, because its type is wrong. The message contains the
            value.
        ValueError: A prompt is empty, a key is unknown, or a token id is out of range.
    """
    prompts = _to_list(prompts)
    if not isinstance(prompts, list) or _is_token_ids(prompts):
        return [normalize_prompt(prompts, name="prompt", vocab_size=vocab_size)]
    if not prompts:
        raise ValueError("prompts is empty: pass at least one prompt")
    return [
        normalize_prompt(prompt, name=f"prompts[{i}]", vocab_size=vocab_size)
        for i, prompt in enumerate(prompts)
    ]


def normalize_prompt(
    prompt: object, *, name: str = "prompt", vocab_size: int | None = None
) -> NormalizedPrompt:
    """Convert one prompt to a `NormalizedPrompt`.

    If a mapping contains both a text and token ids, the model receives the token ids, and the text
    is only copied to the outputs.

    Args:
        prompt: The prompt from the caller.
        name: Name of the prompt in error messages.
        vocab_size: Token ids must be less than `vocab_size`; None for no upper limit.

    Raises:
        TypeError, ValueError: As in `normalize_prompts`.
    """
    prompt = _to_list(prompt)
    if isinstance(prompt, Mapping):
        return _prompt_from_mapping(prompt, name, vocab_size)
    if isinstance(prompt, list):
        return NormalizedPrompt(token_ids=_check_token_ids(prompt, name, vocab_size))
    return NormalizedPrompt(text=_check_text(prompt, name))


def pair_completions(
    prompts: object, completions: object, *, vocab_size: int | None = None
) -> list[tuple[NormalizedPrompt, NormalizedPrompt]]:
    """Return a list of pairs (prompt, completion) for `Engine.score_completions`.

    A single prompt that is not in a list is paired with every completion.

    Args:
        prompts: The prompt or prompts from the caller.
        completions: The completion or completions from the caller.
        vocab_size: Token ids must be less than `vocab_size`; None for no upper limit.

    Raises:
        TypeError, ValueError: A prompt or completion is invalid, or the numbers of prompts and
            completions differ.
    """
    given = _to_list(prompts)
    is_list = isinstance(given, list) and not _is_token_ids(given)
    checked = normalize_prompts(given, vocab_size=vocab_size)
    answers = _to_list(completions)
    if not isinstance(answers, list) or _is_token_ids(answers):
        named = {"completions": answers}
    elif not answers:
        raise RequestError("completions", "is empty", remedy="pass one completion per prompt")
    else:
        named = {f"completions[{i}]": each for i, each in enumerate(answers)}
    if not is_list:
        checked *= len(named)
    if len(checked) != len(named):
        raise RequestError(
            "completions",
            f"has {format_count(len(named), 'entry', 'entries')} for "
            f"{format_count(len(checked), 'prompt')}",
            remedy="pass one completion per prompt; repeat a prompt that has several completions",
        )
    found = [_check_completion(each, name, vocab_size) for name, each in named.items()]
    return list(zip(checked, found, strict=True))


def _check_completion(value: object, name: str, vocab_size: int | None) -> NormalizedPrompt:
    value = _to_list(value)
    if isinstance(value, list):
        return NormalizedPrompt(token_ids=_check_token_ids(value, name, vocab_size))
    if not isinstance(value, str):
        raise RequestTypeError(
            name,
            "must be a string or a list of token ids; got "
            f"{type(value).__name__}: {short_repr(value)}",
        )
    return NormalizedPrompt(text=_check_text(value, name))


def pair_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """Return a list with one `SamplingParams` per prompt.

    Args:
        params: One `SamplingParams` for all prompts, a list with one per prompt, or None for
            defaults.
        num_prompts: Number of prompts.

    Raises:
        TypeError: A value is not a `SamplingParams`.
        ValueError: The length of the list differs from `num_prompts`.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise TypeError(_params_error("params", params))
    for i, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise TypeError(_params_error(f"params[{i}]", item))
    if len(params) != num_prompts:
        raise ValueError(
            f"params has {format_count(len(params), 'entry', 'entries')} for "
            f"{format_count(num_prompts, 'prompt')}: "
            "pass one SamplingParams for all prompts, or one per prompt"
        )
    return list(params)


def pair_priorities(priority: object, num_prompts: int) -> list[int]:
    """Return a list with one priority per prompt.

    Args:
        priority: A list with one priority per prompt; None for priority 0.
        num_prompts: Number of prompts.

    Raises:
        TypeError: `priority` is not a list of integers.
        ValueError: The length of the list differs from `num_prompts`.
    """
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, (list, tuple)):
        raise RequestTypeError(
            "priority", "must be a list of integers, one per prompt", value=short_repr(priority)
        )
    if len(priority) != num_prompts:
        raise ValueError(
            f"priority has {format_count(len(priority), 'entry', 'entries')} for "
            f"{format_count(num_prompts, 'prompt')}: pass one per prompt"
        )
    return [check_priority(value, f"priority[{i}]") for i, value in enumerate(priority)]


def check_priority(value: object, name: str = "priority") -> int:
    """Return `value` as an int, or raise TypeError if the value is not an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise RequestTypeError(
            name, "must be an integer; lower numbers are served earlier", value=short_repr(value)
        )
    return int(value)


def _params_error(name: str, value: object) -> str:
    return f"{name} must be SamplingParams, got {type(value).__name__}: {short_repr(value)}"


def _to_list(value: object) -> object:
    """Convert a tuple, a range or an array to a list; return any other value unchanged."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, (tuple, range)) else value


def _is_token_ids(items: list[Any]) -> bool:
    """Return whether a list is one prompt of token ids rather than several prompts.

    A list with any integer counts as one prompt: `[1, 2, "x"]` is one prompt with an invalid id.
    """
    return any(isinstance(item, (int, np.integer)) for item in items)


def _prompt_from_mapping(
    prompt: Mapping[Any, Any], name: str, vocab_size: int | None
) -> NormalizedPrompt:
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    if unknown:
        raise RequestError(
            name, f"has the unknown key {unknown[0]!r}; known keys are {', '.join(_PROMPT_KEYS)}"
        )
    text, ids = prompt.get("prompt"), _to_list(prompt.get("prompt_token_ids"))
    if text is None and ids is None:
        raise RequestError(name, "has neither 'prompt' nor 'prompt_token_ids'")
    return NormalizedPrompt(
        text=None if text is None else _check_text(text, f"{name}['prompt']"),
        token_ids=(
            None
            if ids is None
            else _check_token_ids(ids, f"{name}['prompt_token_ids']", vocab_size)
        ),
        cache_salt=_check_salt(prompt.get("cache_salt"), f"{name}['cache_salt']"),
    )


def _check_salt(salt: object, name: str) -> str | None:
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    if isinstance(salt, str):
        raise RequestError(name, "is empty", remedy="pass a non-empty string, or omit the key")
    raise RequestTypeError(
        name, f"must be a non-empty string; got {type(salt).__name__}: {short_repr(salt)}"
    )


def _check_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise RequestTypeError(
            name, f"must be {_PROMPT_DESCRIPTION}; got {type(text).__name__}: {short_repr(text)}"
        )
    if not text:
        raise RequestError(name, "is empty", remedy="pass at least one character")
    return text


def _check_token_ids(ids: object, name: str, vocab_size: int | None) -> list[int]:
    if not isinstance(ids, list):
        raise RequestTypeError(name, f"must be a list of token ids; got {type(ids).__name__}")
    if not ids:
        raise RequestError(name, "is empty", remedy="pass at least one token id")
    # Checking each id is slow. Usually, all ids have the type int, so test the set of types first.
    if set(map(type, ids)) != {int}:
        ids = [_check_token_id(token_id, name, i) for i, token_id in enumerate(ids)]
    limit = vocab_size or float("inf")
    if not _are_in_range(limit, ids):
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < limit)
        known = f"known ids are 0 to {vocab_size - 1}" if vocab_size else "ids start at 0"
        raise RequestError(
            name, f": the token id {ids[position]} at position {position} is unknown; {known}"
        )
    return ids.copy()


def _are_in_range(limit: float, ids: list[int]) -> bool:
    """Return whether all ids are at least 0 and less than `limit`.

    Comparing the ids as a uint64 array takes a quarter of the time of comparing Python integers.
    """
    try:
        return int(np.frombuffer(array("Q", ids), np.uint64).max()) < limit
    except OverflowError:  # an id is negative or has more than 64 bits
        return min(ids) >= 0 and max(ids) < limit


def _check_token_id(token_id: object, name: str, position: int) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
        raise RequestTypeError(
            name,
            f": the token id at position {position} must be an integer; got "
            f"{type(token_id).__name__}: {short_repr(token_id)}",
        )
    return int(token_id)


PIN_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Sampling parameters of the request that computes a pinned prefix. Its output token is dropped."""

SCORE_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Sampling parameters of a request that scores a completion. Its output token is dropped."""

# Generated seeds are multiples of the stride, modulo 2**64. The stride is odd, so these multiples
# differ, and no two requests of an engine share a generated seed.
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class Preprocessor:
    """Creates requests from prompts and parameters, and checks them against the model's limits.

    Attributes:
        tokenizer: Tokenizer of the model; None if prompts and outputs are token ids only.
        vocab_size: Number of token ids. Every token id is less than `vocab_size`.
        max_model_len: Maximum number of tokens in a sequence.
        max_num_seqs: Maximum number of sequences in a step.
        eos_token_ids: End tokens of the model.
        seed: Base seed for the requests that specify no seed.
        mask_client: Client of the mask worker, which compiles grammars; None without a tokenizer.
        logprobs_mode: Kind of values that the engine reports for output tokens, such as
            log-probabilities or logits.
    """

    tokenizer: Tokenizer | None
    _: KW_ONLY
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    seed: int
    mask_client: MaskWorkerClient | None = None
    logprobs_mode: str = "raw_logprobs"

    def __post_init__(self):
        self._arrival_numbers, self._seq_ids, self._request_numbers = (
            itertools.count() for _ in range(3)
        )

    def tokenize(self, prompt: NormalizedPrompt) -> NormalizedPrompt:
        """Return the prompt with its token ids.

        Raises:
            ValueError: The prompt is a text, and the engine has no tokenizer or the text cannot be
                encoded.
        """
        if prompt.token_ids is not None or prompt.text is None:
            return prompt
        ids = self.require_tokenizer("a text prompt").encode(prompt.text)
        ids = _check_token_ids(ids, "prompt['prompt_token_ids']", self.vocab_size)
        return replace(prompt, token_ids=ids)

    def join_completion(
        self, prompt: NormalizedPrompt, completion: NormalizedPrompt, name: str
    ) -> tuple[NormalizedPrompt, int]:
        """Return the prompt followed by the completion, and the number of tokens before the
        completion.

        If both are texts, the joined text is tokenized. If the prompt alone has n tokens, the
        completion is every token of the joined text after the first n.

        Args:
            prompt: The prompt.
            completion: The completion, as `pair_completions` returned it.
            name: Name of the completion in error messages.

        Raises:
            ValueError: A text cannot be tokenized, or the completion adds no token.
        """
        ids = self.tokenize(prompt).token_ids or []
        if completion.token_ids is not None:
            joined = ids + completion.token_ids
        elif prompt.token_ids is None and prompt.text is not None:
            text = prompt.text + (completion.text or "")
            joined = self.tokenize(NormalizedPrompt(text=text)).token_ids or []
        else:
            tokenizer = self.require_tokenizer("a text completion")
            added = tokenizer.encode(completion.text or "", add_special_tokens=False)
            joined = ids + (_check_token_ids(added, name, self.vocab_size) if added else [])
        if len(joined) <= len(ids):
            raise RequestError(
                name,
                "adds no token to the prompt",
                remedy="pass the prompt and the completion as token ids",
            )
        return replace(prompt, text=None, token_ids=joined), len(ids)

    def cut_to_full_blocks(self, prompt: object, block_size: int) -> NormalizedPrompt:
        """Return the prompt without the tokens after its last full block.

        Args:
            prompt: A prompt as the caller passed it.
            block_size: Number of tokens in a block.

        Raises:
            TypeError, ValueError: The prompt is invalid, or does not fill a block.
        """
        checked = self.tokenize(normalize_prompt(prompt, vocab_size=self.vocab_size))
        ids = checked.token_ids or []
        if len(ids) < block_size:
            raise ValueError(
                f"the prefix has {format_count(len(ids), 'token')}, but only full blocks of "
                f"{block_size} are shared: pass a longer prefix, or create the engine with a "
                "smaller block_size"
            )
        full_blocks = ids[: len(ids) // block_size * block_size]
        return replace(checked, text=None, token_ids=full_blocks)

    def require_tokenizer(self, purpose: str) -> Tokenizer:
        """Return the tokenizer.

        Args:
            purpose: Feature that needs the tokenizer, such as "a text prompt". The error message
                begins with it.

        Raises:
            ValueError: The engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError(
                "",
                f"{purpose} needs a tokenizer, but skip_tokenizer_init=True loaded none",
                remedy="pass token ids, or create the engine with skip_tokenizer_init=False",
            )
        return self.tokenizer

    def make_request_state(
        self,
        prompt: NormalizedPrompt,
        params: SamplingParams,
        priority: int = 0,
        *,
        request_id: str | None = None,
        ids_in_use: Container[str] = (),
        first_scored_position: int | None = None,
    ) -> RequestState:
        """Return a checked and tokenized request, ready for `EngineLoop.add`.

        A refused request uses up no generated id and no generated seed.

        Args:
            prompt: The normalised prompt.
            params: Sampling parameters of the request.
            priority: Requests with lower numbers are served earlier. The scheduler refuses a
                priority that its policy does not support.
            request_id: The id of the request; None to generate an id that is not in use.
            ids_in_use: Ids of unfinished requests.
            first_scored_position: Position of the first prompt token to score (see `Sequence`).
                If None, the position is 1 if `params.prompt_logprobs` is set; otherwise no prompt
                token is scored.

        Raises:
            TypeError, ValueError: A parameter is invalid, or the prompt cannot be tokenized.
        """
        params.validate_for(
            self.vocab_size,
            MAX_LOGPROBS,
            self.eos_token_ids,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            logprobs_mode=self.logprobs_mode,
        )
        if params.stop_strings:
            self.require_tokenizer(f"stop={params.stop!r}")
        if params.structured_outputs is not None:
            self.require_tokenizer("structured_outputs")
        prompt, priority = self.tokenize(prompt), check_priority(priority)
        token_ids, end_token_ids = prompt.token_ids or [], params.ending_ids(self.eos_token_ids)
        search = _make_beam_search(params, end_token_ids)
        request = Request.from_prompt(
            self._choose_request_id(request_id, ids_in_use),
            token_ids,
            StopCriteria(
                max_tokens=params.max_tokens or self.max_model_len,
                min_tokens=params.min_tokens,
                stop_token_ids=end_token_ids,
            ),
            seq_id_counter=self._seq_ids,
            num_samples=params.num_samples if search is None else 1,
            seed=self._choose_seed(params),
            beam=search,
            priority=priority,
            cache_salt=prompt.cache_salt,
            first_scored_position=first_scored_position if params.prompt_logprobs is None else 1,
        )
        constraint, spec = None, params.structured_outputs
        if spec is not None and self.mask_client is not None:
            constraint = self.mask_client.submit(spec, end_token_ids, params.num_samples)
        state_arguments = self.tokenizer, self.eos_token_ids, constraint
        return RequestState(request, params, prompt.text, token_ids, *state_arguments)

    def _choose_request_id(self, request_id: str | None, ids_in_use: Container[str]) -> str:
        if request_id is None:
            names = (f"request-{number}" for number in self._request_numbers)
            return next(name for name in names if name not in ids_in_use)
        if not isinstance(request_id, str) or not request_id:
            raise RequestTypeError(
                "request_id",
                "must be a non-empty string, or None to generate an id",
                value=repr(request_id),
            )
        return request_id

    def _choose_seed(self, params: SamplingParams) -> int:
        arrival = next(self._arrival_numbers)
        if params.seed is not None:
            return int(params.seed)  # a numpy integer could overflow
        return self.seed + (arrival + 1) * _SEED_STRIDE


def _make_beam_search(params: SamplingParams, end_token_ids: frozenset[int]) -> BeamSearch | None:
    """Return the beam search that `params` specify; None without `beam_width`."""
    if params.beam_width is None:
        return None
    return BeamSearch(
        params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        end_token_ids=end_token_ids,
    )
