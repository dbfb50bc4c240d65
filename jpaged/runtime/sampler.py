"""Sample tokens on the device, from each row's logits, sampling parameters and state."""

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

from jpaged.config import LogprobsMode
from jpaged.core.plan import NO_TOKEN
from jpaged.models.sharding import all_gather, all_max, shard_start
from jpaged.sampling_params import SamplingParams
from pallas_kernels import (
    KEPT_MASS_COLUMN,
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

# Columns of packed sampling parameters.
_FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SEED, _TOP_K, _MIN_TOKENS, _FLAGS = slice(6, 8), 8, 9, 10
_ROW_STRUCT = struct.Struct("=6f2I3i")  # one number per column above

ROW_WIDTH = _ROW_STRUCT.size // 4
"""Number of int32 columns of packed sampling parameters (W)."""

ROWS_PER_LOAD, TOKENS_PER_LOAD = 64, 5376
"""Number of rows (N) and number of tokens (E) per launch of `load_rows`. With these numbers, the
packed input is at most 64 KiB, the size of the largest fragment of `allocation_guard`."""

# Bounds for temperatures and other divisors. A float32 between these bounds is never 0, infinite or
# subnormal.
_MIN_DIVISOR, _MAX_DIVISOR = 1e-30, 1e30
_INT32_MAX = 2**31 - 1

_ROW_ADJUSTS, _ROW_BIASED, _ROW_SCORED, _ROW_RANKED = 1, 2, 4, 8  # bits of the column `_FLAGS`

_PROCESSED_MODES = LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS
_LOGITS_MODES = LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS


class SamplingRows(NamedTuple):
    """Sampling parameters of each batch row. A row with a `temperature` of 0 is greedy."""

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    """0 disables top-k."""
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    seed: UInt32[Array, "B 2"]
    position: Int32[Array, "B"]
    """Index, in its sequence, of the token to sample."""
    repetition_penalty: Float32[Array, "B"]
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    min_tokens: Int32[Array, "B"]
    """Number of output tokens that the row must have before its end tokens are allowed."""
    is_adjusted: Bool[Array, "B"]
    """Whether sampling uses the row's `SamplingState`. If false, the state may be left over from an
    earlier sequence."""
    is_biased: Bool[Array, "B"]
    """Whether sampling uses the row's `logit_bias`."""
    is_scored: Bool[Array, "B"]
    """Whether the request needs the log-probabilities of the row's token."""
    is_ranked: Bool[Array, "B"]
    """Whether the scores rank the request's answers (`best_of`, `beam_width`). The row's scores are
    then log-probabilities, whatever `logprobs_mode` is."""


class SamplingState(NamedTuple):
    """State for penalties, biases and forbidden tokens, with one row per running sequence. Row R-1
    is the padding row."""

    token_state: Int32[Array, "R V"]
    """State of each token: its count in the output, whether the prompt contains it (`IN_PROMPT`),
    and whether it is forbidden until `min_tokens` (`IS_ENDING`). All three share one word, so that
    a step reads one word per token."""
    logit_bias: Float32[Array, "R V"]
    """Biases added to the logits; -inf forbids a token. Only rows whose `SamplingRows.is_biased` is
    true are read."""
    prompt_lens: Int32[Array, "R"]
    """Number of prompt tokens of each row."""


def pack_params(params: SamplingParams, seed: int) -> np.ndarray:
    """Pack the sampling parameters of one sequence into int32 [W] for `unpack_params`.

    Args:
        params: Sampling parameters of the request.
        seed: Seed of the sequence: any 64-bit integer, signed or unsigned.
    """
    kind = _ROW_ADJUSTS * params.adjusts_logits | _ROW_BIASED * params.biases_logits
    kind |= _ROW_SCORED * params.needs_logprobs | _ROW_RANKED * params.ranks_by_logprobs
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
"""Packed parameters of a batch row without a sequence, int32 [W]. The row is greedy, so it adds no
work for random sampling."""


def unpack_params(packed: Int32[Array, "B W"], position: Int32[Array, "B"]) -> SamplingRows:
    """Unpack the sampling parameters of each batch row inside a jitted step.

    Args:
        packed: Sampling parameters of each row, as packed by `pack_params`.
        position: Index, in the row's sequence, of the token to sample.
    """
    floats = jax.lax.bitcast_convert_type(packed[:, : len(_FLOAT_COLUMNS)], jnp.float32)
    return SamplingRows(
        **{name: floats[:, column] for column, name in enumerate(_FLOAT_COLUMNS)},
        seed=jax.lax.bitcast_convert_type(packed[:, _SEED], jnp.uint32),
        top_k=packed[:, _TOP_K],
        min_tokens=packed[:, _MIN_TOKENS],
        is_adjusted=(packed[:, _FLAGS] & _ROW_ADJUSTS) != 0,
        is_biased=(packed[:, _FLAGS] & _ROW_BIASED) != 0,
        is_scored=(packed[:, _FLAGS] & _ROW_SCORED) != 0,
        is_ranked=(packed[:, _FLAGS] & _ROW_RANKED) != 0,
        position=position,
    )


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """Return the biases of one row for `load_bias`, float32 [V]: the values of `logit_bias`, and
    -inf for tokens that `allowed_token_ids` leaves out."""
    if params.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[list(params.allowed_token_ids)] = 0.0
    if params.logit_bias:
        bias[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    return bias


def init_sampling_state(num_rows: int, vocab_size: int) -> SamplingState:
    """Return a state of `num_rows` rows that leaves all logits unchanged. The state takes 8 bytes
    per row and token of the vocabulary."""
    shape = (num_rows, vocab_size)
    return SamplingState(
        token_state=jnp.zeros(shape, jnp.int32),
        logit_bias=jnp.zeros(shape, jnp.float32),
        prompt_lens=jnp.zeros(num_rows, jnp.int32),
    )


class RowMarks(NamedTuple):
    """Initial values of `SamplingState.token_state` for a sequence that joins the batch.

    `tokens` has token ids, and `marks` has one number for each of them. Both are int32 [L].
    `load_rows` writes each mark into the sequence's row of `token_state`, at the column of its
    token id. `tokens` has three parts, in this order:

    - Prompt tokens, with the mark `IN_PROMPT`. `load_rows` sets this value, so that a repeated
      prompt token has no further effect.
    - Output tokens, with the mark 1. `load_rows` adds the marks, so that it counts repeated tokens.
    - Tokens that are forbidden before `min_tokens`, with the mark `IS_ENDING`. `load_rows` adds the
      mark, and each of these tokens appears once.
    """

    tokens: np.ndarray
    marks: np.ndarray
    num_prompt_tokens: int

    @staticmethod
    def of(
        token_ids: Sequence[int], num_prompt_tokens: int, ending_ids: Collection[int] = ()
    ) -> "RowMarks":
        """Return the initial `SamplingState.token_state` values of a sequence's tokens.

        Args:
            token_ids: Prompt tokens, then output tokens. Only a sequence that was preempted has
                output tokens when it joins the batch.
            num_prompt_tokens: Number of prompt tokens.
            ending_ids: Tokens that are forbidden before `min_tokens`.
        """
        tokens = np.array([*token_ids, *ending_ids], np.int32)
        marks = np.ones(len(tokens), np.int32)
        marks[:num_prompt_tokens] = IN_PROMPT
        marks[len(token_ids) :] = IS_ENDING
        return RowMarks(tokens, marks, num_prompt_tokens)


def pack_marks(
    rows: Mapping[int, RowMarks], padding_row: int, vocab_size: int
) -> Iterator[np.ndarray]:
    """Yield the argument `marks` for each call of `load_rows`.

    The calls together initialize all rows in `rows`. A mark is an initial value for
    `SamplingState.token_state`, at one row and one token id.

    Each argument is an int32 array [2 N + 3 E] with five parts: N row indices, N prompt lengths, E
    row indices, E token ids, E marks. N is `ROWS_PER_LOAD`, and E is `TOKENS_PER_LOAD`.

    Args:
        rows: Initial values of new sequences, by row of `SamplingState`.
        padding_row: Value that pads the first N row indices.
        vocab_size: Value that pads the last three parts.
    """
    items = list(rows.items())
    for first in range(0, len(items), ROWS_PER_LOAD):
        part = items[first : first + ROWS_PER_LOAD]
        padding = np.array([[padding_row], [0]], np.int32).repeat(ROWS_PER_LOAD, axis=1)
        header = padding.copy()
        header[:, : len(part)] = [row for row, _ in part], [it.num_prompt_tokens for _, it in part]
        sizes = [len(it.tokens) for _, it in part]
        owners = np.repeat(header[0, : len(part)], sizes)
        tokens, marks = (
            np.concatenate(column) for column in zip(*(it[:2] for _, it in part), strict=True)
        )
        for start in range(0, max(len(owners), 1), TOKENS_PER_LOAD):
            entries = np.full((3, TOKENS_PER_LOAD), vocab_size, np.int32)
            chunk = slice(start, start + TOKENS_PER_LOAD)
            entries[:, : len(owners[chunk])] = owners[chunk], tokens[chunk], marks[chunk]
            yield np.concatenate([header.ravel(), entries.ravel()])
            header = padding


def load_rows(sampling: SamplingState, marks: Int32[Array, "X"]) -> SamplingState:
    """Initialize the rows of `SamplingState` for sequences that join the batch.

    Only sequences whose parameters adjust the logits need this call. The rows of all other
    sequences are never read.

    Args:
        sampling: State of all running sequences. XLA updates the state in place if the caller
            donates the state.
        marks: Array from `pack_marks`: N row indices, N prompt lengths, then E row indices, E
            token ids and E marks. `RowMarks` describes the marks. Token id V is padding.
    """
    V = sampling.token_state.shape[1]
    rows, prompt_lens = marks[: 2 * ROWS_PER_LOAD].reshape(2, ROWS_PER_LOAD)
    owners, tokens, kinds = marks[2 * ROWS_PER_LOAD :].reshape(3, TOKENS_PER_LOAD)
    owners = jnp.where(tokens < V, owners, 0)
    token_state = sampling.token_state.at[rows].set(0)
    # Each scatter writes only some of the tokens. Give the other tokens the index V: the scatter
    # drops this index because it is out of bounds. An index of -1 would mean the last token.
    prompt = jnp.where(kinds == IN_PROMPT, tokens, V)
    others = jnp.where(kinds == IN_PROMPT, V, tokens)
    token_state = token_state.at[owners, prompt].set(IN_PROMPT, mode="drop")
    token_state = token_state.at[owners, others].add(kinds, mode="drop")
    prompt_lens = sampling.prompt_lens.at[rows].set(prompt_lens)
    return sampling._replace(token_state=token_state, prompt_lens=prompt_lens)


def load_bias(
    sampling: SamplingState, row: Int32[Array, ""], bias: Float32[Array, "V"]
) -> SamplingState:
    """Set the biases in row `row` of the state to an array from `bias_row`.

    Only sequences with biases need this call. XLA updates the state in place if the caller donates
    the state.
    """
    return sampling._replace(logit_bias=sampling.logit_bias.at[row].set(bias))


def record_tokens(
    state: SamplingState,
    row_ids: Int32[Array, "B"],
    token_ids: Int32[Array, "B"],
    is_output: Bool[Array, "B"],
) -> SamplingState:
    """Add 1 to the output count of each row's sampled token, unless `is_output` is false or the
    token is `NO_TOKEN`. XLA updates the state in place if the caller donates the state."""
    V = state.token_state.shape[1]
    kept = jnp.where(is_output & (token_ids >= 0), token_ids, V)
    return state._replace(token_state=state.token_state.at[row_ids, kept].add(1, mode="drop"))


def make_adjustments(
    rows: SamplingRows, state: SamplingState, row_ids: Int32[Array, "B"]
) -> Adjustments:
    """Return the adjustments of each sequence's logits: biases, forbidden tokens and penalties.
    `row_ids` has the row of each sequence in `state`."""
    early = rows.position - state.prompt_lens[row_ids] < rows.min_tokens
    bits = (rows.is_adjusted, IS_ADJUSTED), (rows.is_biased, HAS_BIASES), (early, BELOW_MIN_TOKENS)
    kinds = sum((jnp.where(holds, jnp.int32(bit), 0) for holds, bit in bits), jnp.int32(0))
    penalties = jnp.stack(
        [rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty], axis=1
    )
    return Adjustments(state.token_state, state.logit_bias, row_ids, kinds, penalties)


class SamplerLevel(IntFlag):
    """Sampling level: the set of sampling features that a compiled program has.

    The features are independent, except that `TRUNCATED` includes `RANDOM`. A feature changes only
    the tokens of rows whose sampling parameters use the feature. A batch may therefore run at any
    level that has the features of all its rows.
    """

    GREEDY = 0
    """Greedy rows: a temperature of 0."""
    RANDOM = 1
    """Random sampling, for rows with a temperature above 0."""
    TRUNCATED = 3
    """Random sampling with top-k, top-p and min-p."""
    ADJUSTED = 4
    """Biases, forbidden tokens and penalties."""
    LOGPROBS = 8
    """Log-probabilities of tokens."""

    def covers(self, other: "SamplerLevel") -> bool:
        """Return whether this set of sampling features contains all features in `other`."""
        return other & ~self == 0

    @property
    def needs_whole_rows(self) -> bool:
        """Whether sampling needs the logits of the whole vocabulary. If false, the best token of
        each device's vocabulary shard is enough."""
        return not SamplerLevel.RANDOM.covers(self)


SCORED_GREEDY = SamplerLevel.ADJUSTED | SamplerLevel.LOGPROBS
"""Set of all sampling features except random sampling. For rows that need neither adjustments nor
scores, a program with these features runs one additional kernel, which exits immediately. If
devices split the vocabulary, the program also gathers the logits of all devices."""

FULL_LEVEL = SamplerLevel.TRUNCATED | SCORED_GREEDY


def required_level(params: SamplingParams) -> SamplerLevel:
    """Return the set of sampling features that a request's parameters need."""
    level = SamplerLevel.GREEDY
    if params.temperature != 0.0:
        level = SamplerLevel.TRUNCATED if params.truncates else SamplerLevel.RANDOM
    if params.adjusts_logits:
        level |= SamplerLevel.ADJUSTED
    return level | SamplerLevel.LOGPROBS if params.needs_logprobs else level


class SampledTokens(NamedTuple):
    """Sampled tokens, and their scores if the program has the feature `SamplerLevel.LOGPROBS`."""

    token_ids: Int32[Array, "B"]
    """Sampled token of each row; `NO_TOKEN` if the row's logits have no finite maximum. The logits
    are then NaN or infinite, or all tokens are forbidden. The scores of such a row are meaningless.
    """
    scores: Int32[Array, "B W"] | None = None
    """Scores packed by `pallas_kernels.token_scores`, with the probability mass that truncation
    kept. The token column is valid in every row."""


class _Distribution(NamedTuple):
    """Distribution from which a token is drawn in each row with a temperature above 0."""

    logits: Float32[Array, "B V"]
    """Logits after biases, forbidden tokens and penalties."""
    is_greedy: Bool[Array, "B"]
    temperature: Float32[Array, "B"]
    """Temperature of each row; 1 in greedy rows."""
    scaled: Float32[Array, "B V"]
    """Difference of each logit from the row's highest logit, divided by the temperature."""
    kept: Bool[Array, "B V"] | None
    """Tokens that truncation (top-k, top-p, min-p) kept; None if the program does not truncate.
    Ignored in greedy rows."""


def sample(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    state: SamplingState | None,
    row_ids: Int32[Array, "B"],
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int = 0,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    call_shared: Callable | None = None,
    is_vocab_sharded: bool = False,
) -> SampledTokens:
    """Sample a token for each row of the batch.

    The operations run in vLLM's order: biases and forbidden tokens, penalties, temperature, min-p,
    top-k, top-p. A token depends only on the logits, parameters, seed and position of its row. A
    seeded request therefore gives the same tokens in any batch.

    If devices split the vocabulary, they exchange either tokens or logits. If
    `level.needs_whole_rows` is False, each device finds the best token of its shard, and the
    devices compare these tokens. Otherwise, the devices first gather whole rows of logits.

    Args:
        logits: Unchanged logits of the model. If `is_vocab_sharded`, the columns are the device's
            shard.
        rows: Sampling parameters of each batch row.
        state: State of the running sequences. Required if `level` has `ADJUSTED`, otherwise not
            read.
        row_ids: Row in `state` of each batch row; R-1 for padding.
        level: Static. Set of sampling features that contains `required_level` of every row.
        backend: Static. Implementation of the kernels.
        max_logprobs: Static. Number of most probable tokens to return if `level` has `LOGPROBS`.
        logprobs_mode: Static. Kind of values in the scores, such as log-probabilities or logits.
        call_shared: Static. Function that calls another function which several programs share (see
            `jpaged.compile.recipes`); None to call shared functions directly.
        is_vocab_sharded: Static. Whether devices split the vocabulary.

    Raises:
        ValueError: `level` has `ADJUSTED`, and `state` is None.
    """
    if is_vocab_sharded and level.needs_whole_rows:
        logits, is_vocab_sharded = all_gather(logits, axis=1), False
    adjustments = None
    if SamplerLevel.ADJUSTED in level:
        if state is None:
            raise ValueError(
                f"state is None, but sampling with {level.name} needs a state: pass a SamplingState"
            )
        adjustments = make_adjustments(rows, state, row_ids)
    call = _call_directly if call_shared is None else call_shared
    options = {"count": max_logprobs, "backend": backend}
    named = {}
    if logprobs_mode in _LOGITS_MODES:
        named["reports_logits"] = ~rows.is_ranked
    if SamplerLevel.LOGPROBS in level and SamplerLevel.RANDOM not in level:
        if logprobs_mode in _PROCESSED_MODES and adjustments is not None:
            logits, adjustments = adjust_logits(logits, adjustments, backend=backend), None
        given = logits, adjustments, rows.is_scored
        scores = call(partial(greedy_scores, **options), *given, **named)
        return SampledTokens(scores[:, TOKEN_COLUMN], scores)
    best, height, distribution = _choose_tokens(
        logits, rows, adjustments, level, backend, call, is_vocab_sharded
    )
    token_ids = jnp.where(jnp.isfinite(height), best, jnp.int32(NO_TOKEN))
    if SamplerLevel.LOGPROBS not in level or distribution is None:
        return SampledTokens(token_ids)
    if logprobs_mode in _PROCESSED_MODES:
        logits = _processed_logits(distribution, logprobs_mode, rows.is_ranked)
    scores = call(partial(token_scores, **options), logits, token_ids, rows.is_scored, **named)
    if distribution.kept is not None:
        mass = _kept_mass(distribution.scaled, distribution.kept, distribution.is_greedy)
        mass = jax.lax.bitcast_convert_type(mass, jnp.int32)
        scores = scores.at[:, KEPT_MASS_COLUMN].set(mass)
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
) -> tuple[Int32[Array, "B"], Float32[Array, "B"], _Distribution | None]:
    """Sample a token for each row: the token with the highest value.

    If the row's temperature is 0, the values are logits. Otherwise, the values are scaled and
    truncated logits plus Gumbel noise.

    Returns:
        The sampled tokens, the values of these tokens, and the distribution from which random
        sampling draws. The distribution is None if `level` has no `RANDOM`.
    """
    if adjustments is not None:
        logits = adjust_logits(logits, adjustments, backend=backend)
    if SamplerLevel.RANDOM not in level:
        return *_find_highest(logits, is_vocab_sharded), None
    greedy = rows.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    untruncated = scaled = _apply_temperature(logits, temperature, is_vocab_sharded)
    kept = None
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
    best = _find_highest(jnp.where(greedy[:, None], logits, drawn), is_vocab_sharded)
    return *best, _Distribution(logits, greedy, temperature, untruncated, kept)


def _processed_logits(
    distribution: _Distribution, logprobs_mode: LogprobsMode, is_ranked: Bool[Array, "B"]
) -> Float32[Array, "B V"]:
    """Return the logits after temperature and truncation, with -inf for removed tokens.

    If a row reports log-probabilities and its temperature is not 1, the row's highest logit is
    subtracted. The subtraction keeps the precision at low temperatures, and does not change the
    log-probabilities.

    Args:
        distribution: Logits of the rows, and intermediate results of sampling.
        logprobs_mode: Kind of values that the rows report.
        is_ranked: Whether the scores rank the answers of the row's request (`best_of`,
            `beam_width`). If so, the row reports log-probabilities, whatever `logprobs_mode` is.
    """
    logits, is_greedy, temperature, scaled, kept = distribution
    if logprobs_mode == LogprobsMode.PROCESSED_LOGITS:
        scaled = jnp.where(is_ranked[:, None], scaled, logits / temperature[:, None])
    scaled = jnp.where((temperature == 1.0)[:, None], logits, scaled)
    return scaled if kept is None else jnp.where(kept | is_greedy[:, None], scaled, -jnp.inf)


def _kept_mass(
    scaled: Float32[Array, "B V"], kept: Bool[Array, "B V"], is_greedy: Bool[Array, "B"]
) -> Float32[Array, "B"]:
    """Return the total probability of the tokens that truncation kept; exactly 1 if truncation
    removed no token."""
    weights = jnp.exp(scaled)
    kept_weight = jnp.where(kept, weights, 0.0).sum(axis=1)
    removed_weight = jnp.where(kept, 0.0, weights).sum(axis=1)
    return jnp.where(is_greedy, 1.0, kept_weight / (kept_weight + removed_weight))


def _find_highest(
    x: Float32[Array, "B V"], is_vocab_sharded: bool
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Return the token with the highest value in each row, and the value.

    If `is_vocab_sharded`, compare the tokens of all devices. Among equal values, the token with the
    lowest id is returned: devices hold the vocabulary in order, and `first_maximum` returns the
    first maximum.
    """
    best, height = first_maximum(x)
    if not is_vocab_sharded:
        return best, height
    tokens = best + shard_start(x.shape[1])
    # Each device sends two numbers per row: the id of its best token and that token's value.
    best = jnp.stack([tokens, jax.lax.bitcast_convert_type(height, jnp.int32)], axis=1)
    found = all_gather(best[:, None], axis=1)
    device, height = first_maximum(jax.lax.bitcast_convert_type(found[:, :, 1], jnp.float32))
    return jnp.take_along_axis(found[:, :, 0], device[:, None], axis=1)[:, 0], height


def _apply_temperature(
    logits: Float32[Array, "B V"], temperature: Float32[Array, "B"], is_vocab_sharded: bool
) -> Float32[Array, "B V"]:
    # Subtract the maximum before the division. At any temperature, the most probable token then has
    # the value 0, and other tokens have finite values or -inf. Otherwise, inf - inf could occur
    # later.
    highest = logits.max(axis=1, keepdims=True)
    if is_vocab_sharded:
        highest = all_max(highest)
    return (logits - highest) / temperature[:, None]


def _gumbel_noise(
    seed: UInt32[Array, "B 2"], position: Int32[Array, "B"], V: int, is_vocab_sharded: bool
) -> Float32[Array, "B V"]:
    """Return Gumbel noise for each row and token.

    The noise comes from threefry: the seed is the key, and (position, token id) is the counter. If
    `is_vocab_sharded`, the V tokens are the device's shard, and their ids count from the start of
    the whole vocabulary.

    The code calls the primitive instead of `jax.random`. The noise therefore does not depend on
    JAX's flags or on array shapes.
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
    # The uniform numbers u lie strictly between 0 and 1. Usually, the token with the largest noise
    # is sampled, so the largest noise must be precise. In the formula below, the noise is largest
    # for u near 0, where float32 is most precise. In the usual formula, -log(-log(u)), the noise is
    # largest for u near 1.
    uniform = (high ^ low).astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))
