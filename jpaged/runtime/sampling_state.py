"""What the sampler knows of each row: its parameters, packed, and the tokens it has seen.

Parameters travel as one int32 matrix a step (floats and seeds by their bits), so that a step
uploads one array. Counts, masks and biases as wide as the vocabulary stay on the device.
"""

import struct
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampling_params import SamplingParams

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_ROW = struct.Struct("=6f2I3i")  # the floats, the seed's halves, whole numbers

ROW_WIDTH = _ROW.size // 4
"""Columns of a packed row, W."""

# A float32 keeps its own bits in these bounds through a division, and never becomes 0 or inf.
_SMALLEST, _LARGEST = 1e-30, 1e30
_INT32_MAX = 2**31 - 1


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


class SamplingState(NamedTuple):
    """What the adjustments need of each running sequence; row R-1 is the padding's."""

    output_counts: Int32[Array, "R V"]
    """How often the output has each token."""
    prompt_mask: Bool[Array, "R V"]
    """The tokens that the prompt has."""
    logit_bias: Float32[Array, "R V"]
    """Added to the logits; -inf forbids."""
    ending_mask: Bool[Array, "R V"]
    """The tokens forbidden until `min_tokens`."""


def encode_row(params: SamplingParams, seed: int) -> np.ndarray:
    """Packs the parameters of one sequence into int32[W] for `decode_rows`.

    Args:
        params: the request's parameters.
        seed: any 64-bit integer, signed or not: the sequence's own.
    """
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
        int(params.adjusts_logits),
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
        adjusts=packed[:, 10] != 0,
        position=position,
    )


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """The float32[V] that `load_row` takes: logit_bias, and -inf where a token is not allowed."""
    if params.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[list(params.allowed_token_ids)] = 0.0
    if params.logit_bias:
        bias[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    return bias


def ending_row(
    params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> np.ndarray:
    """The bool[V] that `load_row` takes: the tokens that may not come before `min_tokens`."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[list(params.first_forbidden_ids(eos_token_ids))] = True
    return mask


def init_state(num_rows: int, vocab_size: int) -> SamplingState:
    """A state of R = `num_rows` rows that adjusts nothing: 10 bytes a row and token of V."""
    shape = (num_rows, vocab_size)
    return SamplingState(
        output_counts=jnp.zeros(shape, jnp.int32),
        prompt_mask=jnp.zeros(shape, jnp.bool_),
        logit_bias=jnp.zeros(shape, jnp.float32),
        ending_mask=jnp.zeros(shape, jnp.bool_),
    )


def load_row(
    state: SamplingState,
    row: Int32[Array, ""],
    token_ids: Int32[Array, "L"],
    num_prompt: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
    bias: Float32[Array, "V"],
    ending: Bool[Array, "V"] | None = None,
) -> SamplingState:
    """Starts row `row` anew for a sequence that is admitted, for the first time or again.

    Only a sequence whose parameters adjust the logits needs it: no other one's row is read.

    Args:
        state: donate it, and the update is in place.
        row: the row's index.
        token_ids: prompt then output tokens; whatever follows `num_tokens` is not read.
        num_prompt: how many of them are the prompt's.
        num_tokens: how many are the sequence's.
        bias: as `bias_row` makes it.
        ending: as `ending_row` makes it; None when nothing is forbidden at first.
    """
    V = state.logit_bias.shape[1]
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    # V lies outside the row, where a scatter drops it; -1 would wrap round to the last token.
    prompt = jnp.where(index < num_prompt, token_ids, V)
    output = jnp.where((index >= num_prompt) & (index < num_tokens), token_ids, V)
    counts = jnp.zeros(V, jnp.int32).at[output].add(1, mode="drop")
    mask = jnp.zeros(V, jnp.bool_).at[prompt].set(True, mode="drop")
    if ending is None:
        ending = jnp.zeros_like(mask)
    return SamplingState(
        output_counts=state.output_counts.at[row].set(counts),
        prompt_mask=state.prompt_mask.at[row].set(mask),
        logit_bias=state.logit_bias.at[row].set(bias),
        ending_mask=state.ending_mask.at[row].set(ending),
    )


def record_tokens(
    state: SamplingState,
    row_ids: Int32[Array, "B"],
    token_ids: Int32[Array, "B"],
    counted: Bool[Array, "B"],
) -> SamplingState:
    """Adds the sampled tokens to their rows' output where `counted` and there is one; donate the
    state."""
    V = state.output_counts.shape[1]
    kept = jnp.where(counted & (token_ids >= 0), token_ids, V)
    counts = state.output_counts.at[row_ids, kept].add(1, mode="drop")
    return state._replace(output_counts=counts)
