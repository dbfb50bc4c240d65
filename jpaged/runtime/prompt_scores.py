"""Scoring the prompt tokens that a step computed, for requests that ask."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from jpaged.compile.recipes import PROMPT_LOGPROBS_CHUNK
from jpaged.core.plan import ScheduledSequence
from jpaged.core.request import Request
from jpaged.runtime.results import num_scored_prompt_tokens
from jpaged.sampling_params import SamplingParams

Score = Callable[..., jax.Array]
"""`jpaged.runtime.steps.prompt_logprobs_step` of the step's hidden states."""


def score_prompts(
    scheduled: tuple[ScheduledSequence, ...],
    sampling: Mapping[Request, SamplingParams],
    score: Score,
) -> dict[int, list[jax.Array]]:
    """Launch the scoring of a ragged step's prompt tokens.

    Args:
        scheduled: The step's sequences in the order in which their tokens are flattened.
        sampling: How each request is sampled; those with `prompt_logprobs` ask.
        score: Called with `indices` and `targets`, int32 [PROMPT_LOGPROBS_CHUNK] each.

    Returns:
        seq_id -> what `score` gave for its chunks.
    """
    scored, offset = {}, 0
    for item in scheduled:
        wanted = sampling[item.sequence.request].prompt_logprobs is not None
        count = num_scored_prompt_tokens(item) if wanted else 0
        if count:
            scored[item.sequence.seq_id] = _score_chunks(item, offset, count, score)
        offset += item.num_scheduled_tokens
    return scored


def _score_chunks(
    item: ScheduledSequence, offset: int, count: int, score: Score
) -> list[jax.Array]:
    chunks, size = [], PROMPT_LOGPROBS_CHUNK
    for at in range(0, count, size):
        n = min(size, count - at)
        indices, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
        indices[:n] = np.arange(offset + at, offset + at + n)
        first = item.start + at + 1
        targets[:n] = item.sequence.token_ids[first : first + n]
        chunks.append(score(indices=indices, targets=targets))
    return chunks
