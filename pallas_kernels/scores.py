"""Log-probability, rank and the most probable tokens of each row of logits, in Pallas Triton.

    scan     grid (chunk, row): of each block of 128 tokens the highest key, and of the chunk the
             largest logit and the sum of exp(logit - largest)
    finish   grid (row,): the logarithm of the whole sum; then L rounds: the block with the highest
             key, the first token there that has it, the block's next highest key

A key is an integer in the order of the logits (IEEE's total order, as `jax.lax.top_k` has it), so
that rounds end whatever the row holds. Of equal keys the lowest block comes first, and in it the
lowest token. The rank is counted on the way if the given token is among the L; else the row is read
again. Rows that are not wanted leave both launches at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import ScoresConfig

BLOCK = 128
"""Tokens that share a key."""

NUM_FACTS = 3
"""Columns of a row of scores before its most probable tokens."""

_NONE = np.iinfo(np.int32).min


def token_scores(logits, token_ids, wanted, count, *, config: ScoresConfig, interpret: bool):
    """As `api.token_scores`, of at least one token."""
    batch, width = logits.shape
    chunks = pl.cdiv(width, config.chunk)
    blocks = chunks * (config.chunk // BLOCK)

    def launch(kernel, name, grid, out_shape, num_warps, *arrays):
        return pl.pallas_call(
            functools.partial(kernel, width=width, count=count, chunks=chunks, config=config),
            out_shape=out_shape,
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*arrays)

    scanned = (
        jax.ShapeDtypeStruct((batch, blocks), jnp.int32),
        jax.ShapeDtypeStruct((batch, chunks), jnp.float32),
        jax.ShapeDtypeStruct((batch, chunks), jnp.float32),
    )
    wanted = wanted.astype(jnp.int32)
    grid, warps = (chunks, batch), config.scan_warps
    state = launch(_scan, "token_scores_scan", grid, scanned, warps, logits, wanted)
    packed = jax.ShapeDtypeStruct((batch, NUM_FACTS + 2 * count), jnp.int32)
    arrays = logits, token_ids, wanted, *state
    return launch(_finish, "token_scores_finish", (batch,), packed, config.finish_warps, *arrays)


def _key(logits):
    """Integers in IEEE's total order of the logits."""
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _logit(key):
    """The logit of a key."""
    bits = jnp.where(key >= 0, key, key ^ jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _load(logits_ref, row, columns, width):
    """The logits of some columns, and which of these there are."""
    live = columns < width
    index = jnp.full_like(columns, row), columns
    return plgpu.load(logits_ref.at[index], mask=live, other=-jnp.inf), live


def _scan(logits_ref, wanted_ref, keys_ref, largest_ref, sums_ref, *, width, count, chunks, config):
    chunk, row = pl.program_id(0), pl.program_id(1)

    @pl.when(wanted_ref[row] != 0)
    def _():
        shape = config.chunk // BLOCK, BLOCK
        block = lax.broadcasted_iota(jnp.int32, shape, 0)
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        columns = chunk * config.chunk + block * BLOCK + column
        logits, live = _load(logits_ref, row, columns, width)
        keys = jnp.max(jnp.where(live, _key(logits), jnp.int32(_NONE)), axis=1)
        own = chunk * shape[0] + jnp.arange(shape[0], dtype=jnp.int32)
        plgpu.store(keys_ref.at[jnp.full_like(own, row), own], keys)
        largest = jnp.max(logits)
        base = jnp.where(largest == -jnp.inf, jnp.float32(0), largest)
        largest_ref[row, chunk] = largest
        sums_ref[row, chunk] = jnp.sum(jnp.exp(logits - base))


def _log_total(largest_ref, sums_ref, row, chunks):
    """The logarithm of the sum of a row's exponentials."""
    chunk = jnp.arange(pl.next_power_of_2(chunks), dtype=jnp.int32)
    index, inside = (jnp.full_like(chunk, row), chunk), chunk < chunks
    largest = plgpu.load(largest_ref.at[index], mask=inside, other=-jnp.inf)
    sums = plgpu.load(sums_ref.at[index], mask=inside, other=0)
    whole = jnp.max(largest)
    shares = jnp.where(largest == -jnp.inf, jnp.float32(0), jnp.exp(largest - whole))
    return whole + jnp.log(jnp.sum(sums * shares))


def _finish(
    logits_ref,
    tokens_ref,
    wanted_ref,
    keys_ref,
    largest_ref,
    sums_ref,
    out_ref,
    *,
    width,
    count,
    chunks,
    config,
):
    row = pl.program_id(0)
    token = tokens_ref[row]
    out_ref[row, 0] = token

    @pl.when(wanted_ref[row] != 0)
    def _():
        log_total = _log_total(largest_ref, sums_ref, row, chunks)
        chosen = logits_ref[row, jnp.clip(token, 0, width - 1)]
        out_ref[row, 1] = lax.bitcast_convert_type(chosen - log_total, jnp.int32)

        blocks = chunks * (config.chunk // BLOCK)
        block = jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32)
        index = jnp.full_like(block, row), block
        keys = plgpu.load(keys_ref.at[index], mask=block < blocks, other=_NONE)
        lane = jnp.arange(BLOCK, dtype=jnp.int32)

        def extract(place, carry):
            keys, last_key, last_token, num_reached = carry
            highest = jnp.max(keys)
            first = jnp.min(jnp.where(keys == highest, block, jnp.int32(blocks - 1)))
            columns = first * BLOCK + lane
            logits, live = _load(logits_ref, row, columns, width)
            own = _key(logits)
            left = live & ((own < last_key) | ((own == last_key) & (columns > last_token)))
            own = jnp.where(left, own, jnp.int32(_NONE))
            found = left & (own == highest)
            next_token = jnp.min(jnp.where(found, columns, jnp.int32(width - 1)))
            rest = jnp.max(jnp.where(columns == next_token, jnp.int32(_NONE), own))
            logit = _logit(highest)
            out_ref[row, NUM_FACTS + 2 * place] = next_token
            out_ref[row, NUM_FACTS + 2 * place + 1] = lax.bitcast_convert_type(
                logit - log_total, jnp.int32
            )
            keys = jnp.where(block == first, rest, keys)
            num_reached = num_reached + (logit >= chosen).astype(jnp.int32)
            return keys, highest, next_token, num_reached

        begin = keys, jnp.int32(np.iinfo(np.int32).max), jnp.int32(-1), jnp.int32(0)
        _, lowest, _, num_reached = lax.fori_loop(0, count, extract, begin)
        is_among = _logit(lowest) < chosen
        out_ref[row, 2] = num_reached

        @pl.when(~is_among)
        def _():
            tile = config.rank_tile
            offset = jnp.arange(tile, dtype=jnp.int32)

            def fold(turn, reached):
                logits, live = _load(logits_ref, row, turn * tile + offset, width)
                return reached + (live & (logits >= chosen)).astype(jnp.int32)

            zeros = jnp.zeros(tile, jnp.int32)
            reached = lax.fori_loop(0, pl.cdiv(width, tile), fold, zeros)
            out_ref[row, 2] = jnp.sum(reached)
