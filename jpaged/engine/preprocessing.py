"""Taking a request in: from what the caller gave to a checked, tokenised `Job`, and from there to a
`RequestState`."""

import itertools
import time
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from jpaged.core.beam import BeamSearch
from jpaged.core.request import Request, StopCriteria
from jpaged.engine.inputs import Prompt, checked_priority, normalize_prompt
from jpaged.engine.request_state import RequestState
from jpaged.observe.statistics import RequestMetrics
from jpaged.sampling_params import MAX_LOGPROBS, SamplingParams
from jpaged.text.tokenizer import Tokenizer

PIN_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Of the request that computes a pinned prefix; its token is dropped."""

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two requests of an engine share a seed


class Job(NamedTuple):
    """A checked request; `Intake.make_job` makes them.

    Attributes:
        prompt: With its token ids.
        params: As the caller gave them; the engine can do what they ask for.
        priority: Lower goes first; the scheduler refuses one that it would not look at.
        seed: Of its noise: the caller's, or one of its own.
        arrival_time: When it was made, in seconds of `time.monotonic()`.
    """

    prompt: Prompt
    params: SamplingParams
    priority: int
    seed: int
    arrival_time: float

    @property
    def is_plain(self) -> bool:
        """Whether it is one sequence that takes its turn."""
        asked = self.params
        return asked.num_samples == 1 and asked.beam_width is None and not self.priority


class Intake:
    """Checks requests against an engine's model and limits.

    Args:
        tokenizer: None where only token ids go in and out.
        vocab_size: Every token id is below it.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Most sequences in a step.
        eos_token_ids: The model's own end tokens.
        seed: Of requests that bring none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        eos_token_ids: frozenset[int],
        seed: int,
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()
        self._names = itertools.count()

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt with its token ids.

        Raises:
            ValueError: it is text and there is no tokenizer, or the text cannot be encoded.
        """
        if prompt.token_ids is not None or prompt.text is None:
            return prompt
        ids = self.need_tokenizer("a text prompt").encode(prompt.text)
        whole = {
            "prompt": prompt.text,
            "prompt_token_ids": ids,
            "cache_salt": prompt.cache_salt,
        }
        return normalize_prompt(whole, vocab_size=self.vocab_size)

    def whole_blocks(self, prompt: object, block_size: int) -> Prompt:
        """A prompt cut to the full blocks of `block_size` tokens that it begins with.

        Raises:
            TypeError, ValueError: it is no prompt, or fills no block.
        """
        checked = self.tokenize(normalize_prompt(prompt, vocab_size=self.vocab_size))
        ids = checked.token_ids or []
        if len(ids) < block_size:
            raise ValueError(
                f"the prefix has {len(ids)} tokens and only full blocks of {block_size} are "
                "shared: give a longer one, or make the engine with a smaller block_size"
            )
        whole = ids[: len(ids) // block_size * block_size]
        return replace(checked, text=None, token_ids=whole)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: there is none, though `what` needs it.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer and skip_tokenizer_init=True loaded none: "
                "give token ids, or make the engine with skip_tokenizer_init=False"
            )
        return self.tokenizer

    def make_job(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Job:
        """A normalised prompt and what to do with it, checked; the prompt is tokenised.

        Raises:
            TypeError, ValueError: a parameter is not acceptable, or the prompt cannot be tokenised.
        """
        params.validate_for(
            self.vocab_size,
            MAX_LOGPROBS,
            self._eos_token_ids,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
        )
        if params.stop_strings:
            self.need_tokenizer(f"stop={params.stop!r}")
        prompt, priority = self.tokenize(prompt), checked_priority(priority)
        return Job(prompt, params, priority, self._seed_of(params), time.monotonic())

    def make_state(
        self, job: Job, *, request_id: str | None, ids_in_use: Container[str]
    ) -> RequestState:
        """A request, ready for the scheduler.

        Args:
            job: What to do.
            request_id: None for one that is not in use.
            ids_in_use: Ids of unfinished requests.

        Raises:
            TypeError: the id is not acceptable.
        """
        name = self._unused_name(ids_in_use) if request_id is None else _checked_id(request_id)
        return RequestState(
            request=self._make_request(name, job),
            params=job.params,
            prompt=job.prompt,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            metrics=RequestMetrics(arrival_time=job.arrival_time),
        )

    def _make_request(self, name: str, job: Job) -> Request:
        prompt, params = job.prompt, job.params
        endings = params.ending_ids(self._eos_token_ids)
        return Request.from_prompt(
            name,
            prompt.token_ids or [],
            StopCriteria(
                max_tokens=params.max_tokens or self._max_model_len,
                min_tokens=params.min_tokens,
                stop_token_ids=endings,
            ),
            seq_ids=self._seq_ids,
            num_samples=params.num_samples if params.beam_width is None else 1,
            seed=job.seed,
            beam=_make_search(params, endings),
            priority=job.priority,
            cache_salt=prompt.cache_salt,
            # Each position must be computed to be scored.
            reads_prefix_cache=params.prompt_logprobs is None,
        )

    def _unused_name(self, ids_in_use: Container[str]) -> str:
        names = (f"request-{number}" for number in self._names)
        return next(name for name in names if name not in ids_in_use)

    def _seed_of(self, params: SamplingParams) -> int:
        arrival = next(self._arrivals)
        if params.seed is not None:
            return int(params.seed)  # a numpy integer would overflow
        return self._seed + (arrival + 1) * _SEED_STRIDE


def _checked_id(request_id: object) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise TypeError(f"request_id={request_id!r} must be a non-empty string, or None for one")
    return request_id


def _make_search(params: SamplingParams, end_token_ids: frozenset[int]) -> BeamSearch | None:
    if params.beam_width is None:
        return None
    return BeamSearch(
        params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        end_token_ids=end_token_ids,
    )
