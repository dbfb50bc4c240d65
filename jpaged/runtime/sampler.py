"""Sampling on the device: each row's parameters and state, and from logits to tokens."""

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntFlag
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.core.plan import NO_TOKEN
from jpaged.models.sharding import all_gather, all_max, shard_start
from jpaged.sampling_params import SamplingParams
from pallas_kernels import (
    TOKEN_COLUMN,
    Adjustments,
    Backend,
    adjust_logits,
    first_maximum,
    greedy_scores,
    token_scores,
    truncation_mask,
)
from pallas_kernels.scores.adjustments import (
    BELOW_MIN_TOKENS,
    HAS_BIASES,
    IN_PROMPT,
    IS_ADJUSTED,
    IS_ENDING,
)

# Columns of a packed row.
_FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SEED, _TOP_K, _MIN_TOKENS, _FLAGS = slice(6, 8), 8, 9, 10
_ROW_STRUCT = struct.Struct("=6f2I3i")  # in the order of these columns

ROW_WIDTH = _ROW_STRUCT.size // 4
"""Columns of a packed row, W."""

ROWS_PER_LOAD, TOKENS_PER_LOAD = 64, 5376
"""Rows, N, and tokens, E, that one launch of `load_rows` takes: 64 KiB, a place that launches
leave where it is (`allocation_guard`)."""

# A float32 keeps its own bits in these bounds through a division, and never becomes 0 or inf.
_MIN_DIVISOR, _MAX_DIVISOR = 1e-30, 1e30
_INT32_MAX = 2**31 - 1

_ROW_ADJUSTS, _ROW_BIASED, _ROW_SCORED = 1, 2, 4  # bits of a packed row's kind


class SamplingRows(NamedTuple):
    """The parameters of each batch row. A `temperature` of 0 marks a greedy row."""

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    """0 is off."""
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    seed: UInt32[Array, "B 2"]
    position: Int32[Array, "B"]
    """Index, in its sequence, of the token being sampled."""
    repetition_penalty: Float32[Array, "B"]
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    min_tokens: Int32[Array, "B"]
    """The row's ending tokens are forbidden until its output has this many tokens."""
    is_adjusted: Bool[Array, "B"]
    """Whether the row's state counts; where not, an earlier sequence's may still lie there."""
    is_biased: Bool[Array, "B"]
    """Whether the row's biases count."""
    is_scored: Bool[Array, "B"]
    """Whether the log-probabilities of the row's token are wanted."""


class SamplingState(NamedTuple):
    """What the adjustments need of each running sequence; row R-1 is the padding's."""

    token_state: Int32[Array, "R V"]
    """Of each token: how often the output has it, whether the prompt has it (`IN_PROMPT`), and
    whether it is forbidden until `min_tokens` (`IS_ENDING`). In one word, so that a step reads
    each token's state once."""
    logit_bias: Float32[Array, "R V"]
    """Added to the logits; -inf forbids. Read of rows that are `is_biased` alone."""
    prompt_lens: Int32[Array, "R"]
    """Tokens of the prompt."""


def pack_params(params: SamplingParams, seed: int) -> np.ndarray:
    """Packs the parameters of one sequence into int32[W] for `unpack_params`.

    Args:
        params: the request's parameters.
        seed: any 64-bit integer, signed or not: the sequence's own.
    """
    kind = _ROW_ADJUSTS * params.adjusts_logits | _ROW_BIASED * params.biases_logits
    kind |= _ROW_SCORED * params.needs_logprobs
    packed = _ROW_STRUCT.pack(
        params.temperature and _clamp_divisor(float(params.temperature)),
        params.top_p,
        params.min_p,
        _clamp_divisor(float(params.repetition_penalty)),
        params.presence_penalty,
        params.frequency_penalty,
        seed >> 32 & 0xFFFFFFFF,
        seed & 0xFFFFFFFF,
        min(max(params.top_k, 0), _INT32_MAX),
        min(params.min_tokens, _INT32_MAX),
        kind,
    )
    return np.frombuffer(packed, np.int32)


def _clamp_divisor(value: float) -> float:
    return min(max(value, _MIN_DIVISOR), _MAX_DIVISOR)


PADDING_PARAMS = pack_params(SamplingParams(temperature=0.0), 0)
"""int32[W] for a batch row that has no sequence: greedy, so that nothing is drawn for it."""


def unpack_params(packed: Int32[Array, "B W"], position: Int32[Array, "B"]) -> SamplingRows:
    """Unpacks `pack_params`'s rows on the device; `position` as in `SamplingRows`."""
    floats = jax.lax.bitcast_convert_type(packed[:, : len(_FLOAT_COLUMNS)], jnp.float32)
    return SamplingRows(
        **{name: floats[:, column] for column, name in enumerate(_FLOAT_COLUMNS)},
        seed=jax.lax.bitcast_convert_type(packed[:, _SEED], jnp.uint32),
        top_k=packed[:, _TOP_K],
        min_tokens=packed[:, _MIN_TOKENS],
        is_adjusted=(packed[:, _FLAGS] & _ROW_ADJUSTS) != 0,
        is_biased=(packed[:, _FLAGS] & _ROW_BIASED) != 0,
        is_scored=(packed[:, _FLAGS] & _ROW_SCORED) != 0,
        position=position,
    )


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """The float32[V] that `load_bias` takes: logit_bias, and -inf where a token is not allowed."""
    if params.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[list(params.allowed_token_ids)] = 0.0
    if params.logit_bias:
        bias[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    return bias


def init_sampling_state(num_rows: int, vocab_size: int) -> SamplingState:
    """A state of R = `num_rows` rows that adjusts nothing: 8 bytes a row and token of V."""
    shape = (num_rows, vocab_size)
    return SamplingState(
        token_state=jnp.zeros(shape, jnp.int32),
        logit_bias=jnp.zeros(shape, jnp.float32),
        prompt_lens=jnp.zeros(num_rows, jnp.int32),
    )


class RowMarks(NamedTuple):
    """What a sequence's tokens are marked with when it joins the batch, for the first time or
    again: int32 [L] each, no token twice with `IS_ENDING`, prompt tokens before all else."""

    tokens: np.ndarray
    marks: np.ndarray
    num_prompt_tokens: int

    @staticmethod
    def of(
        token_ids: Sequence[int], num_prompt_tokens: int, ending_ids: Collection[int] = ()
    ) -> "RowMarks":
        """Of prompt then output tokens, and those that may not come before `min_tokens`."""
        tokens = np.array([*token_ids, *ending_ids], np.int32)
        marks = np.ones(len(tokens), np.int32)
        marks[:num_prompt_tokens] = IN_PROMPT
        marks[len(token_ids) :] = IS_ENDING
        return RowMarks(tokens, marks, num_prompt_tokens)


def pack_marks(
    rows: Mapping[int, RowMarks], padding_row: int, vocab_size: int
) -> Iterator[np.ndarray]:
    """The int32 [2 N + 3 E] arrays that `load_rows` takes one after the other to start `rows`."""
    items = list(rows.items())
    for first in range(0, len(items), ROWS_PER_LOAD):
        part = items[first : first + ROWS_PER_LOAD]
        padding = np.array([[padding_row], [0]], np.int32).repeat(ROWS_PER_LOAD, axis=1)
        facts = padding.copy()
        facts[:, : len(part)] = [row for row, _ in part], [own.num_prompt_tokens for _, own in part]
        sizes = [len(own.tokens) for _, own in part]
        owners = np.repeat(facts[0, : len(part)], sizes)
        tokens, marks = (
            np.concatenate(column) for column in zip(*(own[:2] for _, own in part), strict=True)
        )
        for start in range(0, max(len(owners), 1), TOKENS_PER_LOAD):
            entries = np.full((3, TOKENS_PER_LOAD), vocab_size, np.int32)
            chunk = slice(start, start + TOKENS_PER_LOAD)
            entries[:, : len(owners[chunk])] = owners[chunk], tokens[chunk], marks[chunk]
            yield np.concatenate([facts.ravel(), entries.ravel()])
            facts = padding


def load_rows(sampling: SamplingState, marks: Int32[Array, "X"]) -> SamplingState:
    """Starts rows anew for sequences that are admitted, for the first time or again.

    Only sequences whose parameters adjust the logits need it: no other one's row is read.

    Args:
        sampling: donate it, and the update is in place.
        marks: as `pack_marks` makes it: N rows and their prompts' lengths; E rows, tokens and
            marks. A token of V is dropped.
    """
    V = sampling.token_state.shape[1]
    rows, prompt_lens = marks[: 2 * ROWS_PER_LOAD].reshape(2, ROWS_PER_LOAD)
    owners, tokens, kinds = marks[2 * ROWS_PER_LOAD :].reshape(3, TOKENS_PER_LOAD)
    owners = jnp.where(tokens < V, owners, 0)
    token_state = sampling.token_state.at[rows].set(0)
    # V lies outside the row, where a scatter drops it; -1 would wrap round to the last token.
    prompt = jnp.where(kinds == IN_PROMPT, tokens, V)
    others = jnp.where(kinds == IN_PROMPT, V, tokens)
    token_state = token_state.at[owners, prompt].set(IN_PROMPT, mode="drop")
    token_state = token_state.at[owners, others].add(kinds, mode="drop")
    prompt_lens = sampling.prompt_lens.at[rows].set(prompt_lens)
    return sampling._replace(token_state=token_state, prompt_lens=prompt_lens)


def load_bias(
    sampling: SamplingState, row: Int32[Array, ""], bias: Float32[Array, "V"]
) -> SamplingState:
    """Gives row `row` its biases, as `bias_row` makes them; donate the state. Only a sequence with
    biases needs it."""
    return sampling._replace(logit_bias=sampling.logit_bias.at[row].set(bias))


def record_tokens(
    state: SamplingState,
    row_ids: Int32[Array, "B"],
    token_ids: Int32[Array, "B"],
    is_output: Bool[Array, "B"],
) -> SamplingState:
    """Adds the sampled tokens to their rows' output where `is_output` and there is one; donate the
    state."""
    V = state.token_state.shape[1]
    kept = jnp.where(is_output & (token_ids >= 0), token_ids, V)
    return state._replace(token_state=state.token_state.at[row_ids, kept].add(1, mode="drop"))


def make_adjustments(
    rows: SamplingRows, state: SamplingState, row_ids: Int32[Array, "B"]
) -> Adjustments:
    """What changes the logits of each batch row, whose row in `state` is `row_ids`."""
    early = rows.position - state.prompt_lens[row_ids] < rows.min_tokens
    bits = (rows.is_adjusted, IS_ADJUSTED), (rows.is_biased, HAS_BIASES), (early, BELOW_MIN_TOKENS)
    kinds = sum((jnp.where(holds, jnp.int32(bit), 0) for holds, bit in bits), jnp.int32(0))
    penalties = jnp.stack(
        [rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty], axis=1
    )
    return Adjustments(state.token_state, state.logit_bias, row_ids, kinds, penalties)


class SamplerLevel(IntFlag):
    """What a sample step does for rows that ask for it; each needs none of the others, but that
    only drawn tokens are truncated. A level changes no token of a row that needs less of it, so a
    batch may be served by a higher one than it needs."""

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

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a row's token or scores depend on more of its logits than the best of each part
        of the vocabulary."""
        return not SamplerLevel.RANDOM.covers(self)


SCORED_GREEDY = SamplerLevel.ADJUSTED | SamplerLevel.LOGPROBS
"""All but drawing: rows that are not adjusted and not scored cost a kernel that leaves at once (and
a gather of logits, where devices split the vocabulary)."""

FULL_LEVEL = SamplerLevel.TRUNCATED | SCORED_GREEDY


def required_level(params: SamplingParams) -> SamplerLevel:
    """What serves a request; a batch runs at a level that covers all of its requests'."""
    level = SamplerLevel.GREEDY
    if params.temperature != 0.0:
        level = SamplerLevel.TRUNCATED if params.truncates else SamplerLevel.RANDOM
    if params.adjusts_logits:
        level |= SamplerLevel.ADJUSTED
    return level | SamplerLevel.LOGPROBS if params.needs_logprobs else level


class SampledTokens(NamedTuple):
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
    call_shared: Callable | None = None,
    is_vocab_sharded: bool = False,
) -> SampledTokens:
    """Chooses a token for each row of the batch.

    The order is vLLM's: biases and forbidden tokens, penalties, temperature, min-p, top-k, top-p.
    A token depends on its own row's logits, parameters, seed and position alone, so a seeded
    request gives the same tokens whatever shares its batch.

    Where devices split the vocabulary and the level needs no whole rows, each of them looks for
    the best of its own tokens, and these are compared: a token is that of one device, whose logits
    and noise it has. At other levels the devices give each other their parts first.

    Args:
        logits: the model's, unchanged; if `is_vocab_sharded`, of the device's own tokens.
        rows: each batch row's parameters.
        state: needed at a level with ADJUSTED, not read at others.
        row_ids: each batch row's row in `state`; a padded row's is R-1.
        level: static; covers `required_level` of every row.
        backend: static; the kernels' implementation.
        max_logprobs: static; most probable tokens to report at a level with LOGPROBS.
        shared: static; calls what other levels have as well (see `jpaged.compile.recipes`).
        is_split: static; whether each device has a part of the vocabulary, side by side.

    Raises:
        ValueError: the level needs a state and there is none.
    """
    if is_vocab_sharded and level.needs_whole_rows:
        logits, is_vocab_sharded = all_gather(logits, axis=1), False
    adjustments = None
    if SamplerLevel.ADJUSTED in level:
        if state is None:
            raise ValueError(f"state=None at level {level.name}: pass the rows' SamplingState")
        adjustments = make_adjustments(rows, state, row_ids)
    call = _call_directly if call_shared is None else call_shared
    options = {"count": max_logprobs, "backend": backend}
    if SamplerLevel.LOGPROBS in level and SamplerLevel.RANDOM not in level:
        scores = call(partial(greedy_scores, **options), logits, adjustments, rows.is_scored)
        return SampledTokens(scores[:, TOKEN_COLUMN], scores)
    best, height = _choose_tokens(logits, rows, adjustments, level, backend, call, is_vocab_sharded)
    token_ids = jnp.where(jnp.isfinite(height), best, jnp.int32(NO_TOKEN))
    if SamplerLevel.LOGPROBS not in level:
        return SampledTokens(token_ids)
    scores = call(partial(token_scores, **options), logits, token_ids, rows.is_scored)
    return SampledTokens(token_ids, scores)


def _call_directly(function: partial, *arrays: Any, **named: Any) -> Any:
    return function(*arrays, **named)


def _choose_tokens(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    adjustments: Adjustments | None,
    level: SamplerLevel,
    backend: Backend,
    call: Callable,
    is_vocab_sharded: bool,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    if adjustments is not None:
        logits = adjust_logits(logits, adjustments, backend=backend)
    if SamplerLevel.RANDOM not in level:
        return _find_highest(logits, is_vocab_sharded)
    greedy = rows.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    scaled = _apply_temperature(logits, temperature, is_vocab_sharded)
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
    drawn = scaled + _gumbel_noise(rows.seed, rows.position, logits.shape[1], is_vocab_sharded)
    return _find_highest(jnp.where(greedy[:, None], logits, drawn), is_vocab_sharded)


def _find_highest(
    x: Float32[Array, "B V"], is_vocab_sharded: bool
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """`first_maximum` of rows, of all devices' tokens side by side if `is_vocab_sharded`; of equally high
    tokens the one with the lowest id, since devices have theirs in order."""
    best, height = first_maximum(x)
    if not is_vocab_sharded:
        return best, height
    tokens = best + shard_start(x.shape[1])
    own = jnp.stack([tokens, jax.lax.bitcast_convert_type(height, jnp.int32)], axis=1)
    found = all_gather(own[:, None], axis=1)  # all that is exchanged: two numbers a row and device
    device, height = first_maximum(jax.lax.bitcast_convert_type(found[:, :, 1], jnp.float32))
    return jnp.take_along_axis(found[:, :, 0], device[:, None], axis=1)[:, 0], height


def _apply_temperature(
    logits: Float32[Array, "B V"], temperature: Float32[Array, "B"], is_vocab_sharded: bool
) -> Float32[Array, "B V"]:
    # The maximum comes off first: however small the temperature, the top token's 0 stays 0 and
    # the others go to -inf at worst, never to inf - inf.
    highest = logits.max(axis=1, keepdims=True)
    if is_vocab_sharded:
        highest = all_max(highest)
    return (logits - highest) / temperature[:, None]


def _gumbel_noise(
    seed: UInt32[Array, "B 2"], position: Int32[Array, "B"], V: int, is_vocab_sharded: bool
) -> Float32[Array, "B V"]:
    """Gumbel noise from threefry at the counter (position, token id), the seed being the key.
    If `is_vocab_sharded`, of the device's own V tokens: the counter has their ids in the whole vocabulary.

    The primitive itself, not `jax.random`: no JAX flag changes it, and a token's noise depends
    on no shape.
    """
    shape = (position.shape[0], V)

    def wide(column: UInt32[Array, "B"]) -> UInt32[Array, "B V"]:
        return jnp.broadcast_to(column[:, None], shape)

    token = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    if is_vocab_sharded:
        token += shard_start(V).astype(jnp.uint32)
    high, low = threefry2x32_p.bind(
        wide(seed[:, 0]), wide(seed[:, 1]), wide(position.astype(jnp.uint32)), token
    )
    # Half a step off 0 and never rounded to 1. Small values, which make the large noise that
    # wins, keep all of their bits: -log1p(-u), not -log(u).
    uniform = (high ^ low).astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))
