"""Greedy token choice, log-probabilities, ranks and most probable tokens in Pallas Triton.

Two launches process the logits without a sort and usually read them once:

    scan     grid (chunk, row); a chunk has 4,096 tokens
             if greedy: store the chunk's highest adjusted logit and the first token that has it
             if the row needs scores, from the original logits:
                 store the highest key of each block of 128 tokens
                 store the chunk's largest logit and its sum of exp(logit - largest)
    finish   grid (row,)
             if greedy: choose the row's token among the chunks
             if the row needs scores:
                 compute log_total, the log of the sum of exp(logit) over the whole row; 0 if the
                 row reports logits
                 repeat L times: take the block with the highest key, store the first token that
                 has this key, and replace the block's key by the next highest key of the block

A key is an integer that orders like the logit, so that the rounds end even if a row holds NaN. Keys
of the most probable tokens follow IEEE's total order, as `jax.lax.top_k` does. Keys of the greedy
choice treat both zeros as equal and NaN as the highest. Among equal keys the lowest token comes
first.

The L rounds also count the rank of the row's token if its logit is greater than the L-th highest
logit. Otherwise the program reads the row again to count the rank. A row without adjustments reads
no adjustment state.

The scan passes to the finish: the keys, int32 [B, blocks] for whole chunks of blocks; the largest
logits and the sums, float32 [B, chunks]; and for a greedy choice the key and the id of each chunk's
token, int32 [B, chunks]. In rows that need no scores, the keys, largest logits and sums are
undefined.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.scores.adjustments import (
    BELOW_MIN_TOKENS,
    HAS_BIASES,
    IS_ADJUSTED,
    NUM_TOKEN_COLUMNS,
    Adjustments,
    adjust_tile,
)

BLOCK_TOKENS = 128
# In the first launch, which scans the logits, a program reads `CHUNK_TOKENS` tokens.
CHUNK_TOKENS = 4096
# In the second launch, a program reads `RANK_TILE` tokens per iteration to count the rank of a
# token.
RANK_TILE = 4096
NUM_WARPS = 4  # In both launches, a program has `NUM_WARPS` warps.
_MIN_KEY, _MAX_KEY = np.iinfo(np.int32).min, np.iinfo(np.int32).max
# Value of `needs_scores` for rows that report logits. Rows with log-probabilities have 1, and rows
# without scores 0.
_LOGITS = 2
_ONE_BITS = int(np.float32(1).view(np.int32))


def token_scores(
    logits,
    token_ids,
    needs_scores,
    count,
    reports_logits=None,
    *,
    adjustments: Adjustments | None = None,
    interpret: bool,
):
    """Run the public op `token_scores`, or `greedy_scores` if `token_ids` is None.

    The logits must not be empty, and `count` must be from 1 to V. If `adjustments` are given,
    `token_ids` must be None.
    """
    batch, width = logits.shape
    chunks = pl.cdiv(width, CHUNK_TOKENS)
    blocks = chunks * (CHUNK_TOKENS // BLOCK_TOKENS)

    def launch(kernel, name, grid, out_shape, *arrays):
        return pl.pallas_call(
            functools.partial(kernel, is_greedy=token_ids is None),
            out_shape=out_shape,
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
            interpret=interpret,
            name=name,
        )(*arrays)

    def shape(columns, dtype):
        return jax.ShapeDtypeStruct((batch, columns), dtype)

    scanned = shape(blocks, jnp.int32), *(shape(chunks, jnp.float32),) * 2
    if token_ids is None:
        scanned += (shape(chunks, jnp.int32),) * 2
    needs_scores = needs_scores.astype(jnp.int32)
    if reports_logits is not None:
        needs_scores = jnp.where(reports_logits, needs_scores * _LOGITS, needs_scores)
    state = () if adjustments is None else adjustments
    found = launch(
        _scan, "token_scores_scan", (chunks, batch), scanned, logits, needs_scores, *state
    )
    if token_ids is not None:
        found = *found, token_ids
    packed = shape(NUM_TOKEN_COLUMNS + 2 * count, jnp.int32)
    return launch(_finish, "token_scores_finish", (batch,), packed, logits, needs_scores, *found)


def _order_key(logits):
    """Return int32 keys whose order is the order of the logits in IEEE 754's total order."""
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _key_to_logit(key):
    """Return the logit of a key; the inverse of `_order_key`."""
    bits = jnp.where(key >= 0, key, key ^ jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _greedy_key(x):
    """Return int32 keys in the order of the floats; -0.0 equals 0.0, and NaN is the highest."""
    return jnp.where(x != x, jnp.int32(_MAX_KEY), _order_key(jnp.where(x == 0, jnp.float32(0), x)))


def _load_columns(ref, row, columns, other=-jnp.inf):
    """Load the given columns of a row; return the values and a mask of the existing columns."""
    live = columns < ref.shape[1]
    index = jnp.full_like(columns, row), columns
    return plgpu.load(ref.at[index], mask=live, other=other), live


def _scan(logits_ref, needs_scores_ref, *refs, is_greedy):
    width, num_outputs = logits_ref.shape[1], 5 if is_greedy else 3
    state_refs, refs = refs[:-num_outputs], refs[-num_outputs:]
    keys_ref, largest_ref, sums_ref, *chosen_refs = refs
    chunk, row = pl.program_id(0), pl.program_id(1)
    row_needs_scores = needs_scores_ref[row] != 0
    shape = CHUNK_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS
    block = lax.broadcasted_iota(jnp.int32, shape, 0)
    columns = (
        chunk * CHUNK_TOKENS + block * BLOCK_TOKENS + lax.broadcasted_iota(jnp.int32, shape, 1)
    )

    def choose(logits, live):
        x = _adjust_logits(logits, state_refs, row, columns) if state_refs else logits
        keys = jnp.where(live, _greedy_key(x), jnp.int32(_MIN_KEY))
        highest = jnp.max(keys)
        best_ref, token_ref = chosen_refs
        best_ref[row, chunk] = highest
        token_ref[row, chunk] = jnp.min(jnp.where(keys == highest, columns, jnp.int32(width - 1)))

    def measure(logits, live):
        keys = jnp.max(jnp.where(live, _order_key(logits), jnp.int32(_MIN_KEY)), axis=1)
        own = chunk * shape[0] + jnp.arange(shape[0], dtype=jnp.int32)
        plgpu.store(keys_ref.at[jnp.full_like(own, row), own], keys)
        largest = jnp.max(logits)
        base = jnp.where(largest == -jnp.inf, jnp.float32(0), largest)
        largest_ref[row, chunk] = largest
        sums_ref[row, chunk] = jnp.sum(jnp.exp(logits - base))

    if is_greedy:
        logits, live = _load_columns(logits_ref, row, columns)
        choose(logits, live)
        pl.when(row_needs_scores)(lambda: measure(logits, live))
    else:
        pl.when(row_needs_scores)(lambda: measure(*_load_columns(logits_ref, row, columns)))


def _adjust_logits(logits, state_refs, row, columns):
    token_state_ref, biases_ref, state_rows_ref, row_flags_ref, penalties_ref = state_refs
    flags, own = row_flags_ref[row], state_rows_ref[row]

    def adjust():
        biases = lax.cond(
            (flags & HAS_BIASES) != 0,
            lambda: _load_columns(biases_ref, own, columns, 0)[0],
            lambda: jnp.zeros_like(logits),
        )
        token_state, _ = _load_columns(token_state_ref, own, columns, 0)
        penalties = (penalties_ref[row, i] for i in range(3))
        return adjust_tile(logits, token_state, biases, (flags & BELOW_MIN_TOKENS) != 0, *penalties)

    return lax.cond((flags & IS_ADJUSTED) != 0, adjust, lambda: logits)


def _row_index_and_mask(row, ref):
    """Return the indices of all columns of a row, and a mask of the existing columns.

    Triton needs a power of two of columns, so the last indices may be past the end of the row.
    """
    column = jnp.arange(pl.next_power_of_2(ref.shape[1]), dtype=jnp.int32)
    return (jnp.full_like(column, row), column), column < ref.shape[1]


def _load_greedy_token(refs, row, width):
    """Return the greedy token of the row; -1 if the highest logit is not finite."""
    best_ref, token_ref = refs
    index, inside = _row_index_and_mask(row, best_ref)
    keys = plgpu.load(best_ref.at[index], mask=inside, other=_MIN_KEY)
    tokens = plgpu.load(token_ref.at[index], mask=inside, other=width - 1)
    highest = jnp.max(keys)
    # Among equal logits the lowest token id wins. Each chunk has stored the lowest id among its
    # largest logits, so take the minimum over the chunks.
    token = jnp.min(jnp.where(keys == highest, tokens, jnp.int32(width - 1)))
    is_finite = jnp.abs(_key_to_logit(highest)) < jnp.inf  # false for NaN
    return jnp.where(is_finite, token, jnp.int32(-1))


def _log_sum_exp(largest_ref, sums_ref, row):
    """Return log(sum(exp(logits))) of a row, from each chunk's largest logit and sum."""
    index, inside = _row_index_and_mask(row, sums_ref)
    largest = plgpu.load(largest_ref.at[index], mask=inside, other=-jnp.inf)
    sums = plgpu.load(sums_ref.at[index], mask=inside, other=0)
    whole = jnp.max(largest)
    chunk_weights = jnp.where(largest == -jnp.inf, jnp.float32(0), jnp.exp(largest - whole))
    return whole + jnp.log(jnp.sum(sums * chunk_weights))


def _finish(logits_ref, needs_scores_ref, keys_ref, largest_ref, sums_ref, *refs, is_greedy):
    *token_refs, out_ref = refs
    row, width = pl.program_id(0), logits_ref.shape[1]
    token = _load_greedy_token(token_refs, row, width) if is_greedy else token_refs[0][row]
    out_ref[row, 0] = token

    @pl.when(needs_scores_ref[row] != 0)
    def _():
        log_total = _log_sum_exp(largest_ref, sums_ref, row)
        log_total = jnp.where(needs_scores_ref[row] == _LOGITS, jnp.float32(0), log_total)
        chosen = logits_ref[row, jnp.clip(token, 0, width - 1)]
        out_ref[row, 1] = lax.bitcast_convert_type(chosen - log_total, jnp.int32)
        out_ref[row, 3] = jnp.int32(_ONE_BITS)

        blocks, count = keys_ref.shape[1], (out_ref.shape[1] - NUM_TOKEN_COLUMNS) // 2
        index, inside = _row_index_and_mask(row, keys_ref)
        keys, block = plgpu.load(keys_ref.at[index], mask=inside, other=_MIN_KEY), index[1]
        lane = jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)

        def extract(rank, carry):
            keys, last_key, last_token, num_reached = carry
            highest = jnp.max(keys)
            first = jnp.min(jnp.where(keys == highest, block, jnp.int32(blocks - 1)))
            columns = first * BLOCK_TOKENS + lane
            logits, live = _load_columns(logits_ref, row, columns)
            own = _order_key(logits)
            left = live & ((own < last_key) | ((own == last_key) & (columns > last_token)))
            own = jnp.where(left, own, jnp.int32(_MIN_KEY))
            found = left & (own == highest)
            next_token = jnp.min(jnp.where(found, columns, jnp.int32(width - 1)))
            rest = jnp.max(jnp.where(columns == next_token, jnp.int32(_MIN_KEY), own))
            logit = _key_to_logit(highest)
            out_ref[row, NUM_TOKEN_COLUMNS + 2 * rank] = next_token
            out_ref[row, NUM_TOKEN_COLUMNS + 2 * rank + 1] = lax.bitcast_convert_type(
                logit - log_total, jnp.int32
            )
            keys = jnp.where(block == first, rest, keys)
            num_reached = num_reached + (logit >= chosen).astype(jnp.int32)
            return keys, highest, next_token, num_reached

        begin = keys, jnp.int32(_MAX_KEY), jnp.int32(-1), jnp.int32(0)
        _, lowest, _, num_reached = lax.fori_loop(0, count, extract, begin)
        is_among = _key_to_logit(lowest) < chosen
        out_ref[row, 2] = num_reached

        @pl.when(~is_among)
        def _():
            offset = jnp.arange(RANK_TILE, dtype=jnp.int32)

            def fold(turn, reached):
                logits, live = _load_columns(logits_ref, row, turn * RANK_TILE + offset)
                return reached + (live & (logits >= chosen)).astype(jnp.int32)

            zeros = jnp.zeros(RANK_TILE, jnp.int32)
            reached = lax.fori_loop(0, pl.cdiv(width, RANK_TILE), fold, zeros)
            out_ref[row, 2] = jnp.sum(reached)
