"""The step functions, which run on the device. `jpaged.runtime.step_programs` lists their programs.

A step function is pure: every input is an argument, and the large arrays are donated. A step is two
programs launched one after the other. A forward program (`decode_step` or `prefill_step`) leaves
the logits on the device, and `sample_step` reads the logits there. Because sampling is separate,
the unrolled model is compiled once per shape, not once per shape and set of sampling features
(docs/decisions/0003).

An argument means the same in every step:

    model           the model with its parameters
    state           the KV pool and the block tables
    last_tokens     the last sampled token of each running sequence, one row per sequence
    sampling        token counts and biases of the rows; None if `level` has no `ADJUSTED`
    row_tokens      the rows' lengths and tokens; None without speculative decoding
    packed          the batch, as `jpaged.runtime.batch` packs it
    logits, inputs  results of the forward program; `logits` covers the device's shard of the
                    vocabulary if `is_vocab_sharded`
    peer_header     the addresses of the memory through which tensor-parallel devices all-reduce
                    (`pallas_kernels.make_exchange_header`); None if XLA runs the all-reduces

Some arguments are static:

    batch_size        sequences of the bucket (B)
    num_tokens        tokens of the bucket (T)
    backend           the implementation of the kernels
    level             the set of sampling features (`SamplerLevel`)
    max_logprobs      number of most probable tokens to return if `level` has `LOGPROBS`
    logprobs_mode     whether scores are log-probabilities or logits, raw or processed
    call_shared       calls a function that several programs share (`jpaged.compile.recipes`)
    is_vocab_sharded  whether devices split the vocabulary
    drafter           proposes the drafts of a verify step (`jpaged.runtime.drafting`)

With speculative decoding, a step may accept drafts, so the host does not know the length of a row
until it has read the step. The device holds the lengths, and each row has a limit: the number of
tokens for which it has slots. A row whose length exceeds its limit computes and samples nothing.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jpaged.config import LogprobsMode
from jpaged.core.plan import NO_DRAFT, NO_TOKEN, REJECTED
from jpaged.models.attention import AttentionInputs
from jpaged.models.jax_model import StepModel
from jpaged.models.sharding import MESH_AXIS, all_gather, shard_start, split_rows
from jpaged.runtime.batch import (
    DecodeBatch,
    query_start_loc,
    unpack_block_updates,
    unpack_decode,
    unpack_limits,
    unpack_prefill,
    unpack_prefill_limits,
)
from jpaged.runtime.drafting import (
    Drafter,
    DraftInputs,
    RowTokens,
    append_tokens,
    are_accepted,
    resolve_lengths,
)
from jpaged.runtime.fused_layers import run_layers_fused
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.programs import MAX_SCORED_LOGITS_ROWS, MAX_VERIFY_LOGITS_ROWS
from jpaged.runtime.sampler import (
    SampledTokens,
    SamplerLevel,
    SamplingState,
    record_tokens,
    sample,
    unpack_params,
)
from pallas_kernels import (
    LOGPROB_COLUMN,
    NUM_TOKEN_COLUMNS,
    TOKEN_COLUMN,
    Backend,
    copy_blocks,
    token_scores,
)


class SampleInputs(NamedTuple):
    """Inputs of `sample_step` from a decode or prefill step, one entry per row of logits.

    Attributes:
        rows: For each row of logits, the sequence's row in `last_tokens`; R-1 for padding.
        is_output: Whether the sampled token belongs to the output.
        packed_params: Sampling parameters, as packed by `pack_params`.
        positions: Index, in its sequence, of the token to sample; -1 for a row that samples
            nothing, because the row has more tokens than KV slots.
    """

    rows: Int32[Array, "B"]
    is_output: Bool[Array, "B"]
    packed_params: Int32[Array, "B W"]
    positions: Int32[Array, "B"]


def decode_step(
    model: StepModel,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "G C"],
    row_tokens: RowTokens | None = None,
    *,
    batch_size: int,
    backend: Backend,
    peer_header: Int32[Array, "W"] | None = None,
) -> tuple[Float32[Array, "G V"], SampleInputs, KVState]:
    """Compute one token of every sequence.

    `packed` has G rows, as many as the logits. Rows with an index of at least `batch_size` are
    padding.

    Returns:
        The logits after each sequence's token, the inputs of `sample_step`, and the new state.
    """
    padded = unpack_decode(packed)
    if row_tokens is not None:
        lengths = row_tokens.lengths[padded.rows]
        lengths = resolve_lengths(padded.seq_lens, unpack_limits(packed), lengths)
        padded = padded._replace(seq_lens=lengths)
    batch = DecodeBatch._make(column[:batch_size] for column in padded)
    tables = state.block_tables.at[batch.rows, batch.block_indices].set(
        batch.block_ids, mode="drop"
    )
    tokens = jnp.where(batch.tokens >= 0, batch.tokens, last_tokens[batch.rows])
    positions = jnp.maximum(batch.seq_lens - 1, 0)
    batch_tables, seq_lens = tables[batch.rows], batch.seq_lens
    # After accepted drafts, a row may have more tokens than KV slots. Write all keys and values
    # that this step computes for such a row to the null block.
    if row_tokens is not None:
        batch_tables = jnp.where(seq_lens[:, None] < 0, 0, batch_tables)
        seq_lens = jnp.maximum(seq_lens, 0)
    seq_index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    attention = AttentionInputs(
        block_tables=batch_tables,
        seq_lens=seq_lens,
        slot_mapping=_compute_slot_mapping(
            batch_tables, seq_index, positions, state.pool[0].k.shape[1]
        ),
        query_start_loc=None,
        backend=backend,
        peer_header=peer_header,
    )
    hidden, pool = model(tokens, positions, state.pool, attention, run_layers_fused)
    hidden = jnp.pad(hidden, ((0, packed.shape[0] - batch_size), (0, 0)))
    inputs = SampleInputs(padded.rows, padded.is_output, padded.sampling, padded.seq_lens)
    return model.logits(hidden, backend), inputs, KVState(pool, tables)


def prefill_step(
    model: StepModel,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "X"],
    row_tokens: RowTokens | None = None,
    *,
    num_tokens: int,
    batch_size: int,
    backend: Backend,
    call_shared: Callable | None = None,
    peer_header: Int32[Array, "W"] | None = None,
) -> tuple[Float32[Array, "B V"], Float[Array, "T D"], SampleInputs, KVState]:
    """Compute any number of tokens of every sequence, in one flattened array.

    A sequence with one token is a decode row; a batch may mix prompts and decode rows.

    Returns:
        The logits after each sequence's last token, the hidden states of all tokens (for
        `prompt_logprobs_step`), the inputs of `sample_step`, and the new state.
    """
    batch = unpack_prefill(packed, num_tokens=num_tokens, batch_size=batch_size)
    starts = query_start_loc(batch.query_lens)
    seq_lens, block_tables, sample_positions = batch.seq_lens, batch.block_tables, batch.seq_lens
    if row_tokens is not None:
        limits = unpack_prefill_limits(packed, num_tokens=num_tokens, batch_size=batch_size)
        sample_positions = resolve_lengths(seq_lens, limits, row_tokens.lengths[batch.rows])
        # After accepted drafts, a row may have more tokens than KV slots. Write all keys and values
        # that this step computes for such a row to the null block.
        block_tables = jnp.where(sample_positions[:, None] < 0, 0, block_tables)
        seq_lens = jnp.abs(sample_positions)
    seq_index, positions, real = _token_positions(seq_lens, starts, num_tokens)
    tokens = jnp.where(batch.tokens >= 0, batch.tokens, last_tokens[batch.rows[seq_index]])
    slots = _compute_slot_mapping(block_tables, seq_index, positions, state.pool[0].k.shape[1])
    attention = AttentionInputs(
        block_tables=block_tables,
        seq_lens=seq_lens,
        slot_mapping=jnp.where(real, slots, 0),
        query_start_loc=starts,
        backend=backend,
        call_shared=call_shared,
        peer_header=peer_header,
    )
    hidden, pool = model(tokens, positions, state.pool, attention)
    logits = model.logits(hidden[jnp.maximum(starts[1:] - 1, 0)], backend)
    tables = state.block_tables.at[batch.rows].set(batch.block_tables)
    inputs = SampleInputs(batch.rows, batch.is_output, batch.sampling, sample_positions)
    return logits, hidden, inputs, KVState(pool, tables)


def decode_burst_step(
    model: StepModel,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "U B C"],
    sampling: SamplingState | None = None,
    row_tokens: RowTokens | None = None,
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    call_shared: Callable | None = None,
    is_vocab_sharded: bool = False,
    peer_header: Int32[Array, "W"] | None = None,
) -> tuple[SampledTokens, Int32[Array, "R"], SamplingState | None, KVState, RowTokens | None]:
    """Compute several decode steps in one launch, and sample after each step.

    `packed` has one batch per step, in order. Each step reads the tokens that the previous step
    sampled.

    Returns:
        The sampled tokens [U, B] and scores [U, B, W], the last tokens, and the new states.
    """
    options = {"level": level, "backend": backend, "max_logprobs": max_logprobs}
    options |= {"call_shared": call_shared, "is_vocab_sharded": is_vocab_sharded}
    options |= {"logprobs_mode": logprobs_mode}

    sample_rows = model.on_each_device(partial(sample_step, **options))

    def run(carry, batch):
        last, row_state, kv, row_tokens = carry
        logits, inputs, kv = decode_step(
            model,
            kv,
            last,
            batch,
            row_tokens,
            batch_size=batch.shape[0],
            backend=backend,
            peer_header=peer_header,
        )
        sampled, last, row_state, row_tokens = sample_rows(
            logits, inputs, last, row_state, row_tokens
        )
        return (last, row_state, kv, row_tokens), sampled

    carry, sampled = lax.scan(run, (last_tokens, sampling, state, row_tokens), packed)
    return sampled, *carry


def verify_step(
    model: StepModel,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    row_tokens: RowTokens,
    packed: Int32[Array, "U B C"],
    sampling: SamplingState | None = None,
    *,
    drafter: Drafter,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    call_shared: Callable | None = None,
    is_vocab_sharded: bool = False,
    peer_header: Int32[Array, "W"] | None = None,
) -> tuple[SampledTokens, Int32[Array, "R"], SamplingState | None, KVState, RowTokens]:
    """Compute one or several decode steps that verify drafts, in one launch.

    Each step proposes drafts, computes the last token and the drafts of each row (Q tokens), and
    samples after each of these tokens. A row accepts a draft if the draft equals the token
    that the row samples at this position. After the first rejected draft, the row accepts no more
    drafts. The sampled tokens therefore do not depend on the drafts.

    Returns:
        The sampled tokens [U, B, Q] and scores [U, B, Q, W], the last tokens, and the new states.
        `REJECTED` and `NO_DRAFT` follow the last token of a row.
    """
    options = {"level": level, "backend": backend, "max_logprobs": max_logprobs}
    options |= {"call_shared": call_shared, "is_vocab_sharded": is_vocab_sharded}
    options |= {"logprobs_mode": logprobs_mode}

    def run(carry, batch):
        last, row_state, kv, row_tokens = carry
        lengths, drafts = _propose_drafts(drafter, batch, row_tokens)
        hidden, kv = _compute_drafts(
            model, kv, last, batch, lengths, drafts, backend=backend, peer_header=peer_header
        )
        sampled, row_state = _sample_drafts(
            model, hidden, unpack_decode(batch), lengths, drafts, row_state, options
        )
        rows, tokens = unpack_decode(batch).rows, sampled.token_ids
        num_tokens = (tokens >= NO_TOKEN).sum(axis=1, dtype=jnp.int32)
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
        last_rows = jnp.where(num_tokens > 0, rows, last.shape[0] - 1)
        last = last.at[last_rows].set(jnp.maximum(newest, 0))
        row_tokens = append_tokens(row_tokens, rows, lengths, tokens)
        return (last, row_state, kv, row_tokens), sampled

    carry, sampled = lax.scan(run, (last_tokens, sampling, state, row_tokens), packed)
    return sampled, *carry


def _propose_drafts(
    drafter: Drafter, packed: Int32[Array, "B C"], row_tokens: RowTokens
) -> tuple[Int32[Array, "B"], Int32[Array, "B k"]]:
    """Return the number of tokens of each row (see `resolve_lengths`), and the drafts of each row.

    An entry is `NO_DRAFT` if the drafter proposed no draft, or if the row has no slot for the
    draft.
    """
    batch, limits = unpack_decode(packed), unpack_limits(packed)
    lengths = resolve_lengths(batch.seq_lens, limits, row_tokens.lengths[batch.rows])
    drafts = drafter(DraftInputs(row_tokens.history[batch.rows], jnp.maximum(lengths, 0)))
    positions = lengths[:, None] + jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    has_slot = (lengths[:, None] > 0) & (positions < limits[:, None])
    return lengths, jnp.where(has_slot, drafts, NO_DRAFT)


def _compute_drafts(
    model: StepModel,
    state: KVState,
    last_tokens: Int32[Array, "R"],
    packed: Int32[Array, "B C"],
    lengths: Int32[Array, "B"],
    drafts: Int32[Array, "B k"],
    *,
    backend: Backend,
    peer_header: Int32[Array, "W"] | None,
) -> tuple[Float[Array, "Q B D"], KVState]:
    """Run the model on the last token and the k drafts of each row.

    The keys and values of tokens without a slot are written to the null block. The hidden states of
    these tokens are meaningless.

    Returns:
        The hidden states of these Q = 1 + k tokens of each row, and the updated KV state.
    """
    batch, (indices, block_ids) = unpack_decode(packed), unpack_block_updates(packed)
    batch_size, num_drafts = drafts.shape
    num_queries, block_size = 1 + num_drafts, state.pool[0].k.shape[1]
    tables = state.block_tables.at[batch.rows[:, None], indices].set(block_ids, mode="drop")
    last = jnp.where(batch.tokens >= 0, batch.tokens, last_tokens[batch.rows])
    tokens = jnp.concatenate([last[:, None], jnp.maximum(drafts, 0)], axis=1)
    has_slot = jnp.concatenate([(lengths > 0)[:, None], drafts >= 0], axis=1)
    positions = jnp.maximum(lengths - 1, 0)[:, None]
    positions += jnp.arange(num_queries, dtype=jnp.int32)[None]
    # Positions without a slot may lie past the end of the block table. Append null blocks to the
    # table, so that the kernels do not read out of bounds.
    batch_tables = jnp.pad(tables[batch.rows], ((0, 0), (0, -(-num_drafts // block_size))))
    batch_tables = jnp.where((lengths > 0)[:, None], batch_tables, 0)
    seq_index = jnp.arange(batch_size, dtype=jnp.int32).repeat(num_queries)
    flat_positions = positions.reshape(-1)
    slots = _compute_slot_mapping(batch_tables, seq_index, flat_positions, block_size)
    attention = AttentionInputs(
        block_tables=batch_tables,
        seq_lens=jnp.where(lengths > 0, lengths + num_drafts, 0),
        slot_mapping=jnp.where(has_slot.reshape(-1), slots, 0),
        query_start_loc=None,
        backend=backend,
        peer_header=peer_header,
        num_queries=num_queries,
    )
    hidden, pool = model(
        tokens.reshape(-1), flat_positions, state.pool, attention, run_layers_fused
    )
    hidden = hidden.reshape(batch_size, num_queries, -1).transpose(1, 0, 2)
    return hidden, KVState(pool, tables)


def _sample_drafts(
    model: StepModel,
    hidden: Float[Array, "Q B D"],
    batch: DecodeBatch,
    lengths: Int32[Array, "B"],
    drafts: Int32[Array, "B k"],
    sampling: SamplingState | None,
    options: dict[str, Any],
) -> tuple[SampledTokens, SamplingState | None]:
    """Sample after each token of a verify step, up to the first rejected draft of each row.

    Each call of the output head computes at most `MAX_VERIFY_LOGITS_ROWS` rows of logits. If the
    sampling features in `options["level"]` include `ADJUSTED`, the positions are sampled one after
    another, because penalties depend on earlier tokens.
    """
    num_queries, batch_size, width = hidden.shape
    per_head = max(1, MAX_VERIFY_LOGITS_ROWS // batch_size)
    sample_rows = model.on_each_device(partial(sample, **options))
    adjusts = SamplerLevel.ADJUSTED in options["level"]
    tokens, scores, is_accepted = [], [], lengths > 0
    for first in range(0, num_queries, per_head):
        rows = hidden[first : first + per_head].reshape(-1, width)
        logits = model.logits(rows, options["backend"])
        size = batch_size if adjusts else logits.shape[0]
        for start in range(0, logits.shape[0], size):
            repeats = size // batch_size
            offset = first + start // batch_size + jnp.arange(repeats, dtype=jnp.int32)
            positions = (jnp.maximum(lengths, 0)[None] + offset[:, None]).reshape(-1)
            rows = unpack_params(jnp.tile(batch.sampling, (repeats, 1)), positions)
            row_ids = jnp.tile(batch.rows, repeats)
            sampled = sample_rows(logits[start : start + size], rows, sampling, row_ids)
            for i, column in enumerate(sampled.token_ids.reshape(repeats, batch_size)):
                at = len(tokens)
                if at:
                    is_accepted &= are_accepted(drafts[:, at - 1], tokens[-1])
                    missing = jnp.where(drafts[:, at - 1] >= 0, REJECTED, NO_DRAFT)
                else:
                    missing = jnp.full_like(column, NO_DRAFT)
                tokens.append(jnp.where(is_accepted, column, missing))
                if adjusts and sampling is not None:
                    sampling = record_tokens(sampling, batch.rows, tokens[-1], batch.is_output)
                if sampled.scores is not None:
                    part = sampled.scores[i * batch_size : (i + 1) * batch_size]
                    scores.append(part.at[:, TOKEN_COLUMN].set(tokens[-1]))
    found = SampledTokens(jnp.stack(tokens, axis=1), jnp.stack(scores, axis=1) if scores else None)
    return found, sampling


def mask_step(
    logits: Float32[Array, "B V"], allowed: Int32[Array, "B M"], *, is_vocab_sharded: bool = False
) -> Float32[Array, "B V"]:
    """Set the logits of forbidden tokens to -inf, between a forward program and `sample_step`.

    `allowed` has one bit per token of the vocabulary: token `32 w + j` is bit `j` of word `w`. A
    token is allowed if its bit is set. In rows without a grammar, all bits are set.
    """
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]
    is_allowed, width = (bits & 1).reshape(logits.shape[0], -1), logits.shape[1]
    if is_vocab_sharded:
        is_allowed = lax.dynamic_slice_in_dim(is_allowed, shard_start(width), width, axis=1)
    else:
        is_allowed = is_allowed[:, :width]
    return jnp.where(is_allowed != 0, logits, -jnp.inf)


def sample_step(
    logits: Float32[Array, "B V"],
    inputs: SampleInputs,
    last_tokens: Int32[Array, "R"],
    sampling: SamplingState | None = None,
    row_tokens: RowTokens | None = None,
    *,
    level: SamplerLevel,
    backend: Backend,
    max_logprobs: int,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    call_shared: Callable | None = None,
    is_vocab_sharded: bool = False,
) -> tuple[SampledTokens, Int32[Array, "R"], SamplingState | None, RowTokens | None]:
    """Sample one token per row, and store the tokens in `last_tokens` and `row_tokens`.

    `NO_TOKEN` is stored as 0, because the next step looks up the stored token's embedding.
    """
    rows = unpack_params(inputs.packed_params, inputs.positions)
    options = {"level": level, "backend": backend, "max_logprobs": max_logprobs}
    options |= {"call_shared": call_shared, "is_vocab_sharded": is_vocab_sharded}
    options |= {"logprobs_mode": logprobs_mode}
    sampled = sample(logits, rows, sampling, inputs.rows, **options)
    device_rows = inputs.rows
    if row_tokens is not None:
        has_slot = inputs.positions >= 0
        device_rows = jnp.where(has_slot, inputs.rows, last_tokens.shape[0] - 1)
        token_ids, scores = jnp.where(has_slot, sampled.token_ids, NO_DRAFT), sampled.scores
        if scores is not None:
            scores = scores.at[:, TOKEN_COLUMN].set(token_ids)
        sampled = SampledTokens(token_ids, scores)
        new = jnp.where(inputs.is_output, jnp.maximum(token_ids, NO_TOKEN), NO_DRAFT)
        row_tokens = append_tokens(row_tokens, inputs.rows, inputs.positions, new[:, None])
    if sampling is not None:
        sampling = record_tokens(sampling, inputs.rows, sampled.token_ids, inputs.is_output)
    known = jnp.maximum(sampled.token_ids, 0)
    return sampled, last_tokens.at[device_rows].set(known), sampling, row_tokens


def gather_hidden_step(
    hidden: Float[Array, "T D"], indices: Int32[Array, "C"]
) -> Float[Array, "C D"]:
    """Select the rows `indices` of a prefill step's hidden states, for a scoring step."""
    return jnp.take(hidden, indices, axis=0, mode="clip")


def prompt_logprobs_step(
    model: StepModel,
    scored_hidden: Float[Array, "C D"],
    targets: Int32[Array, "C"],
    *,
    max_logprobs: int,
    backend: Backend,
) -> Int32[Array, "C W"]:
    """Return the scores of C prompt tokens, as packed by `token_scores`.

    At most `MAX_SCORED_LOGITS_ROWS` rows of logits exist at once. If devices split the vocabulary,
    they exchange their logits, so that each device has some rows with the whole vocabulary, and
    scores these rows.

    Args:
        scored_hidden: Hidden state of the token before each prompt token.
        targets: The prompt tokens.
    """
    num_rows = targets.shape[0]
    size = math.gcd(num_rows, MAX_SCORED_LOGITS_ROWS)
    score_rows = model.on_each_device(partial(token_scores, count=max_logprobs, backend=backend))

    def score(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = part
        is_sharded = model.is_vocab_sharded
        if is_sharded:  # add padding rows, so that each device gets the same number of rows
            padding = -size % lax.axis_size(MESH_AXIS)
            hidden, targets = (
                jnp.pad(hidden, ((0, padding), (0, 0))),
                jnp.pad(targets, (0, padding)),
            )
        logits = model.logits(hidden, backend)
        if is_sharded:
            logits = split_rows(logits)
            own_rows = logits.shape[0]
            targets = lax.dynamic_slice_in_dim(targets, shard_start(own_rows), own_rows)
        wanted = jnp.ones(targets.shape, jnp.bool_)
        scores = score_rows(logits, targets, wanted)
        return all_gather(scores, axis=0)[:size] if is_sharded else scores

    if size == num_rows:
        return score((scored_hidden, targets))
    parts = scored_hidden.reshape(-1, size, scored_hidden.shape[1]), targets.reshape(-1, size)
    return lax.map(score, parts).reshape(num_rows, -1)


def score_targets_step(
    model: StepModel,
    scored_hidden: Float[Array, "C D"],
    targets: Int32[Array, "C"],
    *,
    backend: Backend,
) -> Float32[Array, "C 2"]:
    """Return each target's log-probability, and whether no token is more probable (1 or 0).

    `scored_hidden` and `targets` are as in `prompt_logprobs_step`. The step returns neither ranks
    nor most probable tokens. A kernel (`StepModel.target_logprobs`) can therefore compute the
    result without storing whole rows of logits. If a model has no such kernel, the step uses
    `prompt_logprobs_step`.
    """
    found = model.target_logprobs(scored_hidden, targets, backend)
    if found is None:  # no kernel scores only the target tokens, so compute whole rows of logits
        options = {"max_logprobs": 1, "backend": backend}
        scores = prompt_logprobs_step(model, scored_hidden, targets, **options)
        columns = scores[:, LOGPROB_COLUMN], scores[:, NUM_TOKEN_COLUMNS + 1]
        logprobs, highest = (lax.bitcast_convert_type(it, jnp.float32) for it in columns)
        return jnp.stack([logprobs, (logprobs >= highest).astype(jnp.float32)], axis=1)
    logprobs, is_greedy = found
    return jnp.stack([logprobs, is_greedy.astype(jnp.float32)], axis=1)


def copy_blocks_step(
    state: KVState, source: Int32[Array, "C"], target: Int32[Array, "C"], *, backend: Backend
) -> KVState:
    """Copy block `source[i]` to block `target[i]` in all layers, for each `i`."""
    return state._replace(pool=copy_blocks(state.pool, source, target, backend=backend))


def fork_rows_step(
    state: KVState,
    parents: Int32[Array, "C"],
    children: Int32[Array, "C"],
    row_tokens: RowTokens | None = None,
) -> tuple[KVState, RowTokens | None]:
    """Copy the block table and the tokens of row `parents[i]` to row `children[i]`, for each `i`.

    The step reads all rows before it writes any. Padding pairs are (padding row, padding row).
    """
    tables = state.block_tables
    state = state._replace(block_tables=tables.at[children].set(tables[parents]))
    if row_tokens is not None:
        row_tokens = RowTokens(*(it.at[children].set(it[parents]) for it in row_tokens))
    return state, row_tokens


def _compute_slot_mapping(
    tables: Int32[Array, "B M"],
    seq_index: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    block_size: int,
) -> Int32[Array, "T"]:
    """Return the pool slot of each token, from the block table of the token's sequence."""
    return tables[seq_index, positions // block_size] * block_size + positions % block_size


def _token_positions(
    seq_lens: Int32[Array, "B"], starts: Int32[Array, "B+1"], num_tokens: int
) -> tuple[Int32[Array, "T"], Int32[Array, "T"], Bool[Array, "T"]]:
    """Return, for each flattened token, its sequence, its position and whether it is real.

    "Real" means that the token is not padding. The position counts from the start of the sequence.
    """
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # With method "compare_all", `searchsorted` is a single kernel. The default method is a loop,
    # which takes one kernel launch per iteration on a GPU.
    seq_index = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
    seq_index = seq_index.astype(jnp.int32)
    real = index < starts[-1]
    seq_index = jnp.minimum(seq_index, seq_lens.shape[0] - 1)
    from_end = starts[seq_index + 1] - index
    positions = jnp.where(real, seq_lens[seq_index] - from_end, 0)
    return seq_index, positions, real
