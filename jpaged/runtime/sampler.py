"""From logits to tokens, inside the step's jit: the logits never leave the device.

The order is vLLM's: biases and forbidden tokens, penalties, temperature, min-p, top-k, top-p.
A token depends on its own row's logits, parameters, seed and position alone, so a seeded request
gives the same tokens whatever shares its batch. A `SamplerLevel` names what of this a batch needs;
a level changes no token of a row that needs less.
"""

from collections.abc import Callable
from enum import IntFlag
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float32, Int32, UInt32

from jpaged.core.plan import NO_TOKEN
from jpaged.runtime.sampling_state import SamplingRows, SamplingState, adjustments_of
from jpaged.sampling_params import SamplingParams
from pallas_kernels import (
    Adjustments,
    Backend,
    adjusted_logits,
    first_maximum,
    greedy_scores,
    token_scores,
    truncation_mask,
)


class SamplerLevel(IntFlag):
    """What a sample step does for rows that ask for it; each needs none of the others, but that
    only drawn tokens are truncated."""

    GREEDY = 0
    """Rows with a temperature of 0."""
    RANDOM = 1
    """Others, too."""
    TRUNCATED = 3
    """And top-k, top-p and min-p."""
    ADJUSTED = 4
    """Biases, forbidden tokens and penalties."""
    LOGPROBS = 8
    """Log-probabilities."""

    def covers(self, other: "SamplerLevel") -> bool:
        """Whether it does all that `other` does."""
        return other & ~self == 0


SCORED_GREEDY = SamplerLevel.ADJUSTED | SamplerLevel.LOGPROBS
"""All but drawing: rows that are not adjusted and not scored cost a kernel that leaves at once."""

EVERYTHING = SamplerLevel.TRUNCATED | SCORED_GREEDY


def required_level(params: SamplingParams) -> SamplerLevel:
    """What serves a request; a batch runs at a level that covers all of its requests'."""
    level = SamplerLevel.GREEDY
    if params.temperature != 0.0:
        level = SamplerLevel.TRUNCATED if params.truncates else SamplerLevel.RANDOM
    if params.adjusts_logits:
        level |= SamplerLevel.ADJUSTED
    return level | SamplerLevel.LOGPROBS if params.needs_logprobs else level


class Sampled(NamedTuple):
    """The chosen tokens; at level LOGPROBS how probable they were, of the unchanged logits."""

    token_ids: Int32[Array, "B"]
    """`NO_TOKEN` where the logits have no finite maximum: they are NaN or infinite, or all tokens
    are forbidden. What is said of such a token's log-probabilities means nothing."""
    scores: Int32[Array, "B W"] | None = None
    """As `pallas_kernels.token_scores` packs them: the token first, in every row."""


def sample(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    state: SamplingState | None,
    row_ids: Int32[Array, "B"],
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int = 0,
    shared: Callable | None = None,
) -> Sampled:
    """Chooses a token for each row of the batch.

    Args:
        logits: the model's, unchanged.
        rows: each batch row's parameters.
        state: needed at a level with ADJUSTED, not read at others.
        row_ids: each batch row's row in `state`; a padded row's is R-1.
        level: static; covers `required_level` of every row.
        backend: static; the kernels' implementation.
        max_logprobs: static; most probable tokens to report at a level with LOGPROBS.
        shared: static; calls what other levels have as well (see `jpaged.compile.shared_calls`).

    Raises:
        ValueError: the level needs a state and there is none.
    """
    adjustments = None
    if SamplerLevel.ADJUSTED in level:
        if state is None:
            raise ValueError(f"state=None at level {level.name}: pass the rows' SamplingState")
        adjustments = adjustments_of(rows, state, row_ids)
    call = _call if shared is None else shared
    options = {"count": max_logprobs, "backend": backend}
    if SamplerLevel.LOGPROBS in level and SamplerLevel.RANDOM not in level:
        scores = call(partial(greedy_scores, **options), logits, adjustments, rows.scored)
        return Sampled(scores[:, 0], scores)
    best, height = _choose(logits, rows, adjustments, level, backend, call)
    token_ids = jnp.where(jnp.isfinite(height), best, jnp.int32(NO_TOKEN))
    if SamplerLevel.LOGPROBS not in level:
        return Sampled(token_ids)
    scores = call(partial(token_scores, **options), logits, token_ids, rows.scored)
    return Sampled(token_ids, scores)


def _call(function: partial, *arrays: Any, **named: Any) -> Any:
    return function(*arrays, **named)


def _choose(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    adjustments: Adjustments | None,
    level: SamplerLevel,
    backend: Backend,
    call: Callable,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    if adjustments is not None:
        logits = adjusted_logits(logits, adjustments, backend=backend)
    if SamplerLevel.RANDOM not in level:
        return first_maximum(logits)
    greedy = rows.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    scaled = _scale(logits, temperature)
    if SamplerLevel.TRUNCATED in level:
        kept = call(
            partial(truncation_mask, backend=backend),
            logits,
            temperature=temperature,
            min_p=rows.min_p,
            top_k=rows.top_k,
            top_p=rows.top_p,
        )
        scaled = jnp.where(kept, scaled, -jnp.inf)
    drawn = scaled + _gumbel(rows.seed, rows.position, logits.shape[1])
    return first_maximum(jnp.where(greedy[:, None], logits, drawn))


def _scale(
    logits: Float32[Array, "B V"], temperature: Float32[Array, "B"]
) -> Float32[Array, "B V"]:
    # The maximum comes off first: however small the temperature, the top token's 0 stays 0 and
    # the others go to -inf at worst, never to inf - inf.
    return (logits - logits.max(axis=1, keepdims=True)) / temperature[:, None]


def _gumbel(
    seed: UInt32[Array, "B 2"], position: Int32[Array, "B"], V: int
) -> Float32[Array, "B V"]:
    """Gumbel noise from threefry at the counter (position, token id), the seed being the key.

    The primitive itself, not `jax.random`: no JAX flag changes it, and a token's noise depends
    on no shape.
    """
    shape = (position.shape[0], V)

    def wide(column: UInt32[Array, "B"]) -> UInt32[Array, "B V"]:
        return jnp.broadcast_to(column[:, None], shape)

    token = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    high, low = threefry2x32_p.bind(
        wide(seed[:, 0]), wide(seed[:, 1]), wide(position.astype(jnp.uint32)), token
    )
    # Half a step off 0 and never rounded to 1. Small values, which make the large noise that
    # wins, keep all of their bits: -log1p(-u), not -log(u).
    uniform = (high ^ low).astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))
