"""What the sampler knows of each row: its parameters, packed, and the tokens it has seen.

Parameters travel as one int32 matrix a step (floats and seeds by their bits), so that a step
uploads one array. Counts, masks and biases as wide as the vocabulary stay on the device.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampling_params import SamplingParams
from pallas_kernels import Adjustments
from pallas_kernels.scores.adjustments import ADJUSTS, BIASED, EARLY, IN_PROMPT, IS_ENDING

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_ROW = struct.Struct("=6f2I3i")  # the floats, the seed's halves, whole numbers

ROW_WIDTH = _ROW.size // 4
"""Columns of a packed row, W."""

LOADED_ROWS, LOADED_TOKENS = 64, 5376
"""Rows, N, and tokens, E, that one launch of `load_rows` takes: 64 KiB, a place that launches
leave where it is (`small_buffers`)."""

# A float32 keeps its own bits in these bounds through a division, and never becomes 0 or inf.
_SMALLEST, _LARGEST = 1e-30, 1e30
_INT32_MAX = 2**31 - 1

_ROW_ADJUSTS, _ROW_BIASED, _ROW_SCORED = 1, 2, 4  # bits of a packed row's last column


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
    repetition: Float32[Array, "B"]
    presence: Float32[Array, "B"]
    frequency: Float32[Array, "B"]
    min_tokens: Int32[Array, "B"]
    """The row's ending tokens are forbidden until its output has this many tokens."""
    adjusts: Bool[Array, "B"]
    """Whether the row's state counts; where not, an earlier sequence's may still lie there."""
    biased: Bool[Array, "B"]
    """Whether the row's biases count."""
    scored: Bool[Array, "B"]
    """Whether the log-probabilities of the row's token are wanted."""


class SamplingState(NamedTuple):
    """What the adjustments need of each running sequence; row R-1 is the padding's."""

    words: Int32[Array, "R V"]
    """Of each token: how often the output has it, whether the prompt has it (`IN_PROMPT`), and
    whether it is forbidden until `min_tokens` (`IS_ENDING`). In one word, so that a step reads
    each token's state once."""
    logit_bias: Float32[Array, "R V"]
    """Added to the logits; -inf forbids. Read of rows that are `biased` alone."""
    prompt_lens: Int32[Array, "R"]
    """Tokens of the prompt."""


def encode_row(params: SamplingParams, seed: int) -> np.ndarray:
    """Packs the parameters of one sequence into int32[W] for `decode_rows`.

    Args:
        params: the request's parameters.
        seed: any 64-bit integer, signed or not: the sequence's own.
    """
    kind = _ROW_ADJUSTS * params.adjusts_logits | _ROW_BIASED * params.biases_logits
    kind |= _ROW_SCORED * params.needs_logprobs
    packed = _ROW.pack(
        params.temperature and _bounded(float(params.temperature)),
        params.top_p,
        params.min_p,
        _bounded(float(params.repetition_penalty)),
        params.presence_penalty,
        params.frequency_penalty,
        seed >> 32 & 0xFFFFFFFF,
        seed & 0xFFFFFFFF,
        min(max(params.top_k, 0), _INT32_MAX),
        min(params.min_tokens, _INT32_MAX),
        kind,
    )
    return np.frombuffer(packed, np.int32)


def _bounded(value: float) -> float:
    return min(max(value, _SMALLEST), _LARGEST)


PADDING_PARAMS = encode_row(SamplingParams(temperature=0.0), 0)
"""int32[W] for a batch row that has no sequence: greedy, so that nothing is drawn for it."""


def decode_rows(packed: Int32[Array, "B W"], position: Int32[Array, "B"]) -> SamplingRows:
    """Unpacks `encode_row`'s rows on the device; `position` as in `SamplingRows`."""
    floats = jax.lax.bitcast_convert_type(packed[:, :6], jnp.float32)
    return SamplingRows(
        **{name: floats[:, column] for column, name in enumerate(_FLOATS)},
        seed=jax.lax.bitcast_convert_type(packed[:, 6:8], jnp.uint32),
        top_k=packed[:, 8],
        min_tokens=packed[:, 9],
        adjusts=(packed[:, 10] & _ROW_ADJUSTS) != 0,
        biased=(packed[:, 10] & _ROW_BIASED) != 0,
        scored=(packed[:, 10] & _ROW_SCORED) != 0,
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


def init_state(num_rows: int, vocab_size: int) -> SamplingState:
    """A state of R = `num_rows` rows that adjusts nothing: 8 bytes a row and token of V."""
    shape = (num_rows, vocab_size)
    return SamplingState(
        words=jnp.zeros(shape, jnp.int32),
        logit_bias=jnp.zeros(shape, jnp.float32),
        prompt_lens=jnp.zeros(num_rows, jnp.int32),
    )


class RowMarks(NamedTuple):
    """What a sequence's tokens are marked with when it joins the batch, for the first time or
    again: int32 [L] each, no token twice with `IS_ENDING`, prompt tokens before all else."""

    tokens: np.ndarray
    marks: np.ndarray
    num_prompt: int

    @staticmethod
    def of(token_ids: Sequence[int], num_prompt: int, ending: Collection[int] = ()) -> "RowMarks":
        """Of prompt then output tokens, and those that may not come before `min_tokens`."""
        tokens = np.array([*token_ids, *ending], np.int32)
        marks = np.ones(len(tokens), np.int32)
        marks[:num_prompt] = IN_PROMPT
        marks[len(token_ids) :] = IS_ENDING
        return RowMarks(tokens, marks, num_prompt)


def pack_marks(
    rows: Mapping[int, RowMarks], padding_row: int, vocab_size: int
) -> Iterator[np.ndarray]:
    """The int32 [2 N + 3 E] arrays that `load_rows` takes one after the other to start `rows`."""
    items = list(rows.items())
    for first in range(0, len(items), LOADED_ROWS):
        part = items[first : first + LOADED_ROWS]
        nobody = np.array([[padding_row], [0]], np.int32).repeat(LOADED_ROWS, axis=1)
        facts = nobody.copy()
        facts[:, : len(part)] = [row for row, _ in part], [own.num_prompt for _, own in part]
        sizes = [len(own.tokens) for _, own in part]
        owners = np.repeat(facts[0, : len(part)], sizes)
        tokens, marks = (
            np.concatenate(column) for column in zip(*(own[:2] for _, own in part), strict=True)
        )
        for start in range(0, max(len(owners), 1), LOADED_TOKENS):
            entries = np.full((3, LOADED_TOKENS), vocab_size, np.int32)
            chunk = slice(start, start + LOADED_TOKENS)
            entries[:, : len(owners[chunk])] = owners[chunk], tokens[chunk], marks[chunk]
            yield np.concatenate([facts.ravel(), entries.ravel()])
            facts = nobody


def load_rows(state: SamplingState, packed: Int32[Array, "X"]) -> SamplingState:
    """Starts rows anew for sequences that are admitted, for the first time or again.

    Only sequences whose parameters adjust the logits need it: no other one's row is read.

    Args:
        state: donate it, and the update is in place.
        packed: as `pack_marks` makes it: N rows and their prompts' lengths; E rows, tokens and
            marks. A token of V is dropped.
    """
    V = state.words.shape[1]
    rows, prompt_lens = packed[: 2 * LOADED_ROWS].reshape(2, LOADED_ROWS)
    owners, tokens, marks = packed[2 * LOADED_ROWS :].reshape(3, LOADED_TOKENS)
    owners = jnp.where(tokens < V, owners, 0)
    words = state.words.at[rows].set(0)
    # V lies outside the row, where a scatter drops it; -1 would wrap round to the last token.
    prompt = jnp.where(marks == IN_PROMPT, tokens, V)
    others = jnp.where(marks == IN_PROMPT, V, tokens)
    words = words.at[owners, prompt].set(IN_PROMPT, mode="drop")
    words = words.at[owners, others].add(marks, mode="drop")
    return state._replace(words=words, prompt_lens=state.prompt_lens.at[rows].set(prompt_lens))


def load_bias(
    state: SamplingState, row: Int32[Array, ""], bias: Float32[Array, "V"]
) -> SamplingState:
    """Gives row `row` its biases, as `bias_row` makes them; donate the state. Only a sequence with
    biases needs it."""
    return state._replace(logit_bias=state.logit_bias.at[row].set(bias))


def record_tokens(
    state: SamplingState,
    row_ids: Int32[Array, "B"],
    token_ids: Int32[Array, "B"],
    counted: Bool[Array, "B"],
) -> SamplingState:
    """Adds the sampled tokens to their rows' output where `counted` and there is one; donate the
    state."""
    V = state.words.shape[1]
    kept = jnp.where(counted & (token_ids >= 0), token_ids, V)
    return state._replace(words=state.words.at[row_ids, kept].add(1, mode="drop"))


def adjustments_of(
    rows: SamplingRows, state: SamplingState, row_ids: Int32[Array, "B"]
) -> Adjustments:
    """What changes the logits of each batch row, whose row in `state` is `row_ids`."""
    early = rows.position - state.prompt_lens[row_ids] < rows.min_tokens
    bits = (rows.adjusts, ADJUSTS), (rows.biased, BIASED), (early, EARLY)
    kinds = sum((jnp.where(holds, jnp.int32(bit), 0) for holds, bit in bits), jnp.int32(0))
    penalties = jnp.stack([rows.repetition, rows.presence, rows.frequency], axis=1)
    return Adjustments(state.words, state.logit_bias, row_ids, kinds, penalties)
