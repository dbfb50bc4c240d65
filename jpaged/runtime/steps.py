"""The jitted step functions: pure, every input an argument, the big arrays donated.

A step is two programs launched back to back: a forward (`decode_step` or `prefill_step`), which
leaves the logits on the device, and `sample_step`, which reads them there. Apart, the unrolled
model compiles once a shape and not once a shape and sampling level (docs/decisions/0003).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from jpaged.models.sharding import all_gather, own_start
from jpaged.runtime.batch import DecodeBatch, query_start_loc, unpack_decode, unpack_prefill
from jpaged.runtime.fused_layers import run_layers_fused
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.sampler import (
    Sampled,
    SamplerLevel,
    SamplingState,
    decode_rows,
    record_tokens,
    sample,
)
from pallas_kernels import Backend, copy_blocks, token_scores


class SampleInputs(NamedTuple):
    """What sampling needs of a step, the same for decode and prefill: one entry a row of logits (of
    a decode step G, padding included).

    Attributes:
        rows: Each one's device row; the padding's is R - 1.
        counted: Whether the sampled token belongs to the output.
        encoded: Parameters, as `encode_row` packs them.
        positions: Index, in its sequence, of the token to be sampled.
    """

    rows: Int32[Array, "B"]
    counted: Bool[Array, "B"]
    encoded: Int32[Array, "B W"]
    positions: Int32[Array, "B"]


def decode_step(
    model: Decoder,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "G C"],
    *,
    batch_size: int,
    backend: Backend,
    peers: Int32[Array, "W"] | None = None,
) -> tuple[Float32[Array, "G V"], SampleInputs, KVState]:
    """One token of every sequence.

    Args:
        model: The model with its parameters.
        state: The KV pool and the block tables (donate it).
        last_tokens: The token each row sampled last.
        packed: The batch (`jpaged.runtime.batch.pack_decode`), padded to as many rows as the
            logits are to have (G).
        batch_size: How many of these may be sequences (B), static; the others are padding.
        backend: The kernels' implementation.
        peers: What the device knows of those that share the model with it, if they sum through each
            other's memory (`pallas_kernels.exchange_header`).

    Returns:
        The logits that follow each sequence's token (of the device's part of the vocabulary where
        devices split it), what sampling needs, and the new state.
    """
    padded = unpack_decode(packed)
    batch = DecodeBatch._make(column[:batch_size] for column in padded)
    tables = state.block_tables.at[batch.rows, batch.block_indices].set(
        batch.block_ids, mode="drop"
    )
    tokens = jnp.where(batch.tokens >= 0, batch.tokens, last_tokens[batch.rows])
    positions = jnp.maximum(batch.seq_lens - 1, 0)
    own_tables = tables[batch.rows]
    own = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    attention = AttentionInputs(
        block_tables=own_tables,
        seq_lens=batch.seq_lens,
        slot_mapping=_slots(own_tables, own, positions, state.pool[0].k.shape[1]),
        query_start_loc=None,
        backend=backend,
        peers=peers,
    )
    hidden, pool = model(tokens, positions, state.pool, attention, run_layers_fused)
    hidden = jnp.pad(hidden, ((0, packed.shape[0] - batch_size), (0, 0)))
    inputs = SampleInputs(padded.rows, padded.counted, padded.sampling, padded.seq_lens)
    return model.logits(hidden), inputs, KVState(pool, tables)


def prefill_step(
    model: Decoder,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "X"],
    *,
    num_tokens: int,
    batch_size: int,
    backend: Backend,
    shared: Callable | None = None,
    peers: Int32[Array, "W"] | None = None,
) -> tuple[Float32[Array, "B V"], Float[Array, "T D"], SampleInputs, KVState]:
    """Any number of tokens of every sequence, flattened; decode rows may ride along.

    Args:
        model, state, last_tokens, backend, peers: As for `decode_step`.
        packed: The batch (`jpaged.runtime.batch.pack_prefill`).
        num_tokens: Tokens of the bucket (T), static.
        batch_size: Sequences of the bucket (B), static.
        shared: Calls what other steps have as well (`jpaged.compile.recipes`), static.

    Returns:
        The logits after each sequence's last token, as of `decode_step`, all tokens' hidden states
        (for `prompt_logprobs_step`), what sampling needs, and the new state.
    """
    batch = unpack_prefill(packed, num_tokens=num_tokens, batch_size=batch_size)
    starts = query_start_loc(batch.query_lens)
    owner, positions, real = _token_positions(batch.seq_lens, starts, num_tokens)
    tokens = jnp.where(batch.tokens >= 0, batch.tokens, last_tokens[batch.rows[owner]])
    slots = _slots(batch.block_tables, owner, positions, state.pool[0].k.shape[1])
    attention = AttentionInputs(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        slot_mapping=jnp.where(real, slots, 0),
        query_start_loc=starts,
        backend=backend,
        shared=shared,
        peers=peers,
    )
    hidden, pool = model(tokens, positions, state.pool, attention)
    logits = model.logits(hidden[jnp.maximum(starts[1:] - 1, 0)])
    tables = state.block_tables.at[batch.rows].set(batch.block_tables)
    inputs = SampleInputs(batch.rows, batch.counted, batch.sampling, batch.seq_lens)
    return logits, hidden, inputs, KVState(pool, tables)


def decode_burst_step(
    model: Decoder,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    sampling: SamplingState | None,
    packed: Int32[Array, "U B C"],
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int,
    shared: Callable | None = None,
    is_split: bool = False,
    peers: Int32[Array, "W"] | None = None,
) -> tuple[Sampled, Int32[Array, "R"], SamplingState | None, KVState]:
    """Several decode steps one after the other, each sampled: one launch for the host.

    Args:
        model, backend, peers: As for `decode_step`.
        state, last_tokens: As for `decode_step` (donate both).
        sampling, level, max_logprobs, is_split: As for `sample_step` (donate the first).
        packed: The steps' batches, in order; each takes the tokens that the one before sampled.
        shared: As for `prefill_step`, static.

    Returns:
        What each step sampled ([U, B] and [U, B, W]), the last tokens and the new states.
    """
    options = {"level": level, "backend": backend, "max_logprobs": max_logprobs}
    options |= {"shared": shared, "is_split": is_split}

    def run(carry, one):
        last, own, kv = carry
        logits, inputs, kv = decode_step(
            model, kv, last, one, batch_size=one.shape[0], backend=backend, peers=peers
        )
        sampled, last, own = sample_step(logits, inputs, last, own, **options)
        return (last, own, kv), sampled

    (last_tokens, sampling, state), sampled = lax.scan(run, (last_tokens, sampling, state), packed)
    return sampled, last_tokens, sampling, state


def mask_step(
    logits: Float32[Array, "B V"], allowed: Int32[Array, "B M"], *, is_split: bool = False
) -> Float32[Array, "B V"]:
    """Forbid tokens between a forward and its sampling: -inf where a row's bit is not set.

    Args:
        logits: From the forward program (donate it).
        allowed: As many bits as there are tokens, 32 a word: token `32 w + j` is bit `j` of word
            `w`. All are set in a row without a grammar.
        is_split: As for `sample_step`, static.
    """
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]
    is_allowed, width = (bits & 1).reshape(logits.shape[0], -1), logits.shape[1]
    if is_split:
        is_allowed = lax.dynamic_slice_in_dim(is_allowed, own_start(width), width, axis=1)
    else:
        is_allowed = is_allowed[:, :width]
    return jnp.where(is_allowed != 0, logits, -jnp.inf)


def sample_step(
    logits: Float32[Array, "B V"],
    inputs: SampleInputs,
    last_tokens: Int32[Array, "R"],
    sampling: SamplingState | None,
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int,
    shared: Callable | None = None,
    is_split: bool = False,
) -> tuple[Sampled, Int32[Array, "R"], SamplingState | None]:
    """Sample a token a sequence and remember it on the device: 0 for none, since it is embedded.

    Args:
        logits: From the forward program.
        inputs: From the forward program.
        last_tokens: The token each row sampled last (donate it).
        sampling: The rows' tokens and biases (donate it); None where `level` is without `ADJUSTED`.
        level: How much sampling does, static.
        backend: The kernels' implementation, static.
        max_logprobs: Most probable tokens listed at a level with `LOGPROBS`, static.
        shared: As for `prefill_step`, static.
        is_split: Whether devices split the vocabulary, so that each has the logits of its own part,
            static.
    """
    rows = decode_rows(inputs.encoded, inputs.positions)
    options = {"level": level, "backend": backend, "max_logprobs": max_logprobs}
    options |= {"shared": shared, "is_split": is_split}
    sampled = sample(logits, rows, sampling, inputs.rows, **options)
    if sampling is not None:
        sampling = record_tokens(sampling, inputs.rows, sampled.token_ids, inputs.counted)
    known = jnp.maximum(sampled.token_ids, 0)
    return sampled, last_tokens.at[inputs.rows].set(known), sampling


def prompt_logprobs_step(
    model: Decoder,
    hidden: Float[Array, "T D"],
    indices: Int32[Array, "C"],
    targets: Int32[Array, "C"],
    *,
    max_logprobs: int,
    backend: Backend,
) -> Int32[Array, "C W"]:
    """How likely the model found some of the prompt's own tokens.

    Args:
        model: The model with its parameters.
        hidden: A prefill step's hidden states.
        indices: Positions in `hidden`.
        targets: The token that followed each of them in the prompt.
        max_logprobs: Most probable tokens listed, static.
        backend: The kernels' implementation, static.

    Returns:
        Their scores, as `pallas_kernels.token_scores` packs them.
    """
    wanted = jnp.ones(targets.shape, jnp.bool_)
    logits = model.logits(hidden[indices])
    if model.head.is_shared:
        logits = all_gather(logits, axis=1)
    return token_scores(logits, targets, wanted, max_logprobs, backend=backend)


def copy_blocks_step(
    state: KVState, source: Int32[Array, "C"], target: Int32[Array, "C"], *, backend: Backend
) -> KVState:
    """Copy blocks `source[i]` to `target[i]` in all layers (donate the state)."""
    return state._replace(pool=copy_blocks(state.pool, source, target, backend=backend))


def fork_rows_step(
    state: KVState, parents: Int32[Array, "C"], children: Int32[Array, "C"]
) -> KVState:
    """Copy the block tables of rows `parents[i]` to rows `children[i]` (donate the state).

    All are read before any is written. Padding pairs are (padding row, padding row).
    """
    tables = state.block_tables
    return state._replace(block_tables=tables.at[children].set(tables[parents]))


def _slots(
    tables: Int32[Array, "B M"],
    owner: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    block_size: int,
) -> Int32[Array, "T"]:
    """The pool slot of each token, through its owner's block table."""
    return tables[owner, positions // block_size] * block_size + positions % block_size


def _token_positions(
    seq_lens: Int32[Array, "B"], starts: Int32[Array, "B+1"], num_tokens: int
) -> tuple[Int32[Array, "T"], Int32[Array, "T"], Bool[Array, "T"]]:
    """Of each flattened token: its sequence, its position there, and whether it is not padding."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # One kernel; the default is a loop, of which a GPU launches each round.
    owner = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
    owner = owner.astype(jnp.int32)
    real = index < starts[-1]
    owner = jnp.minimum(owner, seq_lens.shape[0] - 1)
    from_end = starts[owner + 1] - index
    positions = jnp.where(real, seq_lens[owner] - from_end, 0)
    return owner, positions, real
