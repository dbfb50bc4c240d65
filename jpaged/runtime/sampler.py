"""From logits to tokens, inside the step's jit: the logits never leave the device.

The order is vLLM's: biases and forbidden tokens, penalties, temperature, min-p, top-k, top-p.
A token depends on its own row's logits, parameters, seed and position alone, so a seeded request
gives the same tokens whatever shares its batch. A `SamplerLevel` names how much of this a batch
needs; a level changes no token of a row that needs less.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float32, Int32, UInt32

from jpaged.core.plan import NO_TOKEN
from jpaged.runtime.sampling_state import SamplingRows, SamplingState
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend, truncation_mask


class SamplerLevel(IntEnum):
    """How much a sample step does; each level does all that the lower ones do."""

    GREEDY = 0
    RANDOM = 1
    TRUNCATED = 2
    ADJUSTED = 3
    LOGPROBS = 4


def required_level(params: SamplingParams) -> SamplerLevel:
    """The lowest level that serves a request; a batch runs at its requests' highest."""
    if params.needs_logprobs:
        return SamplerLevel.LOGPROBS
    if params.adjusts_logits:
        return SamplerLevel.ADJUSTED
    if params.temperature == 0.0:
        return SamplerLevel.GREEDY
    return SamplerLevel.TRUNCATED if params.truncates else SamplerLevel.RANDOM


class TokenLogprobs(NamedTuple):
    """Log-probabilities of given tokens and of the L most probable ones, highest first."""

    logprobs: Float32[Array, "T"]
    ranks: Int32[Array, "T"]
    """How many tokens are at least as probable as the given one: 1 is the most probable."""
    top_token_ids: Int32[Array, "T L"]
    top_logprobs: Float32[Array, "T L"]


class Sampled(NamedTuple):
    """The chosen tokens; the log-probabilities (of the unchanged logits) at level LOGPROBS."""

    token_ids: Int32[Array, "B"]
    """`NO_TOKEN` where the logits have no finite maximum: they are NaN or infinite, or all tokens
    are forbidden. What is said of such a token's log-probabilities means nothing."""
    logprobs: Float32[Array, "B"] | None = None
    ranks: Int32[Array, "B"] | None = None
    top_token_ids: Int32[Array, "B L"] | None = None
    top_logprobs: Float32[Array, "B L"] | None = None


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
        state: needed at level ADJUSTED and above, not read below.
        row_ids: each batch row's row in `state`; a padded row's is R-1.
        level: static; at least `required_level` of every row.
        backend: static; the kernels' implementation.
        max_logprobs: static; top tokens to report at level LOGPROBS, L = min(this, V).
        shared: static; calls what other levels have as well (see `jpaged.runtime.shared_calls`).

    Raises:
        ValueError: the level needs a state and there is none.
    """
    adjusted = logits
    if level >= SamplerLevel.ADJUSTED:
        if state is None:
            raise ValueError(f"state=None at level {level.name}: pass the rows' SamplingState")
        adjusted = adjust(logits, rows, state, row_ids)
    best, height = _choose(adjusted, rows, level, backend, shared)
    token_ids = jnp.where(jnp.isfinite(height), best, jnp.int32(NO_TOKEN))
    if level < SamplerLevel.LOGPROBS:
        return Sampled(token_ids)
    return Sampled(token_ids, *token_logprobs(logits, best, max_logprobs))


def adjust(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    state: SamplingState,
    row_ids: Int32[Array, "B"],
) -> Float32[Array, "B V"]:
    """Biases, forbidden tokens and penalties, in the rows that ask for any of them."""
    counts = state.output_counts[row_ids]
    early = counts.sum(axis=1, dtype=jnp.int32) < rows.min_tokens
    x = logits + state.logit_bias[row_ids]
    x = jnp.where(early[:, None] & state.ending_mask[row_ids], -jnp.inf, x)
    penalty = rows.repetition[:, None]
    seen = state.prompt_mask[row_ids] | (counts > 0)
    x = jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)
    x = x - rows.presence[:, None] * (counts > 0).astype(jnp.float32)
    x = x - rows.frequency[:, None] * counts.astype(jnp.float32)
    return jnp.where(rows.adjusts[:, None], x, logits)


def token_logprobs(
    logits: Float32[Array, "T V"], token_ids: Int32[Array, "T"], max_logprobs: int
) -> TokenLogprobs:
    """Log-probabilities of `token_ids` under `logits`, their ranks, and the top L tokens.

    L is `max_logprobs` (static), or V where that is less; 0 gives arrays of width 0.
    """
    total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    values, ids = jax.lax.top_k(logits, min(max_logprobs, logits.shape[1]))
    return TokenLogprobs(
        logprobs=chosen[:, 0] - total,
        ranks=(logits >= chosen).sum(axis=1, dtype=jnp.int32),
        top_token_ids=ids.astype(jnp.int32),
        top_logprobs=values - total[:, None],
    )


def _choose(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    level: SamplerLevel,
    backend: Backend,
    shared: Callable | None,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    if level == SamplerLevel.GREEDY:
        return _first_maximum(logits)
    greedy = rows.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    scaled = _scale(logits, temperature)
    if level >= SamplerLevel.TRUNCATED:
        truncate = partial(truncation_mask, backend=backend)
        kept = (truncate if shared is None else partial(shared, truncate))(
            logits,
            temperature=temperature,
            min_p=rows.min_p,
            top_k=rows.top_k,
            top_p=rows.top_p,
        )
        scaled = jnp.where(kept, scaled, -jnp.inf)
    drawn = scaled + _gumbel(rows.seed, rows.position, logits.shape[1])
    return _first_maximum(jnp.where(greedy[:, None], logits, drawn))


def _first_maximum(x: Float32[Array, "B V"]) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Where each row is highest, and how high; the first NaN of a row counts as highest.

    One pass over `x`: jnp.argmax makes the same reduction and throws the heights away.
    """

    def higher(left, right):
        (x, i), (y, j) = left, right
        is_left = (x > y) | (x != x) | ((x == y) & (i < j))
        return jnp.where(is_left, x, y), jnp.where(is_left, i, j)

    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    nothing = jnp.float32(-jnp.inf), jnp.int32(0)
    height, index = jax.lax.reduce((x, column), nothing, higher, (1,))
    return index, height


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
