"""Top-k and top-p in Pallas Triton: find the lowest logit that each row keeps, without a sort.

Five launches narrow a search interval [low, high) around the threshold. If the row has a top-k, the
search counts the tokens at or above a trial threshold. Otherwise the search adds the probabilities
of these tokens. The count or sum at `low` reaches the target that top-k or top-p sets. The count or
sum at `high` is below the target.

    narrow x 3   grid (chunk, row)
                 add the counts or sums of all chunks from the previous launch
                 update the interval, and choose 8 trial thresholds in the interval
                 store the count or sum of the chunk for each trial threshold
    collect      grid (chunk, row)
                 update the interval, pack the chunk's tokens in the interval strip by strip
                 (if the row has a top-k: all tokens at or above low)
    settle       grid (row,)
                 bisect the packed tokens for the exact threshold, one bit of the key per round
                 if the row has a top-k and a top-p: bisect the remaining tokens again for top-p

The first launch places the trials at increasing distances below the maximum. Later launches space
the trials equally in the interval. The interval therefore usually holds few tokens. The tokens may
not fit in the strips, for example because most logits are equal. The settle launch then reads the
whole row in each round, which is slower but equally exact. A row without top-k and top-p returns
immediately.

Counts and sums are in float32, added in an order that depends only on the size of the vocabulary. A
row's threshold therefore does not depend on the batch. The sums also decrease monotonically as the
threshold rises, which the searches require.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

NUM_TRIALS = 8
NUM_PASSES = 3
# In every kernel launch except the last one, a program reads the logits of `CHUNK` tokens. `CHUNK`
# must be a multiple of `LOADS_IN_FLIGHT * TILE` and of `LOADS_IN_FLIGHT * PACKED_TILE`.
CHUNK = 10240
LOADS_IN_FLIGHT = 4
# The search interval contains the lowest logit to keep (the threshold). In the launches that narrow
# the search interval, a load reads the logits of `TILE` tokens.
TILE = 256
# In the launch that collects the tokens in the interval, a load reads the logits of `PACKED_TILE`
# tokens.
PACKED_TILE = 512
# In the collect launch, each of the 4 warps stores its tokens in a separate strip of memory, so
# that no warp waits for another.
NUM_STRIPS = 4
# A strip of memory holds at most `STRIP_CAPACITY` of the tokens that a warp collects.
STRIP_CAPACITY = 128
# The last launch determines the exact threshold. If it must read a whole row, it uses 16 warps, and
# each load reads this many tokens. Large loads need fewer iterations, and each iteration waits for
# memory.
WHOLE_ROW_TILE = 4096
# The first launch tries thresholds at these distances below the largest logit, in bits. A token at
# distance d is 2**-d times as probable as the most probable token. The launch also tries minus
# infinity as a threshold, which keeps all tokens.
_FIRST_TRIAL_BITS = (23.0, 16.0, 11.5, 8.0, 5.75, 4.0, 2.0)
_LOWEST_TRIAL_BITS = 184.0


class _RowParameters(NamedTuple):
    """Scalar parameters of the row that a program processes.

    Attributes:
        max_logit: The largest logit of the row.
        bits_per_logit: log2(e) / temperature. A logit that is larger by 1 adds this number to
            log2(probability).
        log2_min_p: log2(min_p); -inf disables min-p.
        top_p: The probability to keep; 1 disables top-p.
        top_k: The number of tokens to keep; 0 disables top-k.
    """

    max_logit: jax.Array
    bits_per_logit: jax.Array
    log2_min_p: jax.Array
    top_p: jax.Array
    top_k: jax.Array

    @property
    def has_top_k(self):
        return self.top_k > 0

    @property
    def is_active(self):
        return self.has_top_k | (self.top_p < 1.0)


class _SearchInterval(NamedTuple):
    """Interval of logits that contains a row's threshold, the lowest logit that the row keeps.

    All attributes are scalars. If the row has a top-k, the search counts tokens. Otherwise, the
    search adds token weights. The weight of a token is its probability divided by the largest
    probability.

    Attributes:
        low: Lower bound. The count or sum of the tokens at or above `low` is at least `target`.
        high: Upper bound. The count or sum of the tokens at or above `high` is below `target`.
        target: Number of tokens that top-k keeps, or sum of weights that top-p requires.
        above: Count or sum of the tokens at or above `high`.
    """

    low: jax.Array
    high: jax.Array
    target: jax.Array
    above: jax.Array


def truncation_threshold(logits, rows, top_k, *, interpret: bool):
    """Return the lowest logit that top-k and top-p keep in each row.

    Args:
        logits: float32 [B, V].
        rows: float32 [B, 4]: each row's largest logit, log2(e) / temperature, log2(min_p), top_p.
        top_k: int32 [B]; 0 disables top-k.
        interpret: Whether to run in the interpreter.

    Returns:
        float32 [B]; minus infinity in rows without top-k and top-p.
    """
    batch, width = logits.shape
    chunks = pl.cdiv(width, CHUNK)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    intervals, trials = shape((batch, 4)), shape((batch, NUM_TRIALS))
    narrowed = intervals, trials, shape((batch, chunks, NUM_TRIALS))

    def launch(kernel, name, grid, out_shape, num_warps, *arrays):
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(logits, rows, top_k, *arrays)

    grid, state = (chunks, batch), ()
    for step in range(NUM_PASSES):
        narrow = functools.partial(_narrow, step=step)
        state = launch(narrow, "truncation_narrow", grid, narrowed, 4, *state)
    collected = (
        intervals,
        shape((batch, chunks * NUM_STRIPS * STRIP_CAPACITY)),
        jax.ShapeDtypeStruct((batch, chunks * NUM_STRIPS), jnp.int32),
    )
    state = launch(_collect, "truncation_collect", grid, collected, 4, *state)
    found = launch(_settle, "truncation_settle", (batch,), shape((batch,)), 16, *state)
    # The kernels write a threshold only for rows with a top-k or a top-p.
    is_active = (top_k > 0) | (rows[:, 3] < 1.0)
    return jnp.where(is_active, found, -jnp.inf)


def _load_row_parameters(rows_ref, top_k_ref, row):
    max_logit, bits_per_logit, log2_min_p, top_p = (rows_ref[row, i] for i in range(4))
    return _RowParameters(max_logit, bits_per_logit, log2_min_p, top_p, top_k_ref[row])


def _token_weights(row, logits):
    """Return each token's probability / largest probability; 0 for tokens that min-p removes."""
    relative = (logits - row.max_logit) * row.bits_per_logit
    return jnp.where(relative >= row.log2_min_p, jnp.exp2(relative), jnp.float32(0))


def _load_logits(logits_ref, row, start, size):
    """Load `size` logits from column `start`; return them and a mask of the existing columns."""
    columns = start + jnp.arange(size, dtype=jnp.int32)
    live = columns < logits_ref.shape[1]
    index = jnp.full_like(columns, row), columns
    return plgpu.load(logits_ref.at[index], mask=live, other=-jnp.inf), live


def _load_tiles(logits_ref, row, chunk, turn):
    """Load all tiles of iteration `turn` of the loop. All loads are issued before any tile is used,
    so that they overlap."""
    start = chunk * CHUNK + turn * (TILE * LOADS_IN_FLIGHT)
    return [_load_logits(logits_ref, row, start + i * TILE, TILE) for i in range(LOADS_IN_FLIGHT)]


def _first_trials(row):
    bit = 1.0 / row.bits_per_logit
    below = [row.max_logit - bit * jnp.float32(bits) for bits in _FIRST_TRIAL_BITS]
    return [jnp.float32(-jnp.inf), *below]


def _later_trials(row, interval):
    lowest = row.max_logit - jnp.float32(_LOWEST_TRIAL_BITS) / row.bits_per_logit
    start = jnp.maximum(interval.low, lowest)
    step = (jnp.minimum(interval.high, row.max_logit) - start) * jnp.float32(1 / NUM_TRIALS)
    inner = [start + step * jnp.float32(i) for i in range(1, NUM_TRIALS)]
    # Clip the trial thresholds, because rounding or an empty interval may put a threshold outside
    # the interval.
    return [interval.low, *(jnp.clip(t, interval.low, interval.high) for t in inner)]


def _load_interval(row, refs, row_index, step):
    """Return the interval that contains a row's threshold, the lowest logit that the row keeps.

    Kernel launches narrow this interval. `step` is the index of the current launch, from 0. `refs`
    are the outputs of the previous launch.
    """
    # The target of top-p is unknown until the first launch has summed all probabilities.
    before = _SearchInterval(*map(jnp.float32, (-jnp.inf, jnp.inf, 0.0, 0.0)))
    if step == 0:
        return before
    intervals_ref, trials_ref, sums_ref = refs
    if step > 1:
        before = _SearchInterval(*(intervals_ref[row_index, i] for i in range(4)))
    trial = jnp.arange(NUM_TRIALS, dtype=jnp.int32)
    trials = plgpu.load(trials_ref.at[jnp.full_like(trial, row_index), trial])
    chunks = sums_ref.shape[1]
    shape = NUM_TRIALS, pl.next_power_of_2(chunks)
    chunk = lax.broadcasted_iota(jnp.int32, shape, 1)
    index = jnp.full_like(chunk, row_index), chunk, lax.broadcasted_iota(jnp.int32, shape, 0)
    totals = jnp.sum(plgpu.load(sums_ref.at[index], mask=chunk < chunks, other=0), axis=1)
    target = before.target
    if step == 1:
        share = row.top_p * jnp.max(totals)
        target = jnp.where(row.has_top_k, row.top_k.astype(jnp.float32), share)
    reached = totals >= target
    high = jnp.minimum(before.high, jnp.min(jnp.where(reached, jnp.float32(jnp.inf), trials)))
    above = jnp.max(jnp.where(reached, before.above, totals))
    low = jnp.maximum(before.low, jnp.max(jnp.where(reached, trials, jnp.float32(-jnp.inf))))
    return _SearchInterval(low, high, target, above)


def _store_values(ref, row_index, values):
    for i, value in enumerate(values):
        ref[row_index, i] = value


def _narrow(logits_ref, rows_ref, top_k_ref, *refs, step):
    *state_refs, intervals_ref, trials_ref, sums_ref = refs
    chunk, row_index = pl.program_id(0), pl.program_id(1)
    row = _load_row_parameters(rows_ref, top_k_ref, row_index)

    @pl.when(row.is_active)
    def _():
        interval = _load_interval(row, state_refs, row_index, step)
        trials = _later_trials(row, interval) if step else _first_trials(row)

        def measure(has_top_k):
            def fold(turn, totals):
                for logits, live in _load_tiles(logits_ref, row_index, chunk, turn):
                    values = live.astype(jnp.float32) if has_top_k else _token_weights(row, logits)
                    totals = [
                        total + jnp.where(logits >= trial, values, jnp.float32(0))
                        for total, trial in zip(totals, trials, strict=True)
                    ]
                return totals

            zeros = [jnp.zeros(TILE, jnp.float32) for _ in trials]
            totals = lax.fori_loop(0, CHUNK // (TILE * LOADS_IN_FLIGHT), fold, zeros)
            for i, total in enumerate(totals):
                sums_ref[row_index, chunk, i] = jnp.sum(total)

        pl.when(row.has_top_k)(lambda: measure(True))
        pl.when(~row.has_top_k)(lambda: measure(False))

        @pl.when(chunk == 0)
        def _():
            index = jnp.arange(NUM_TRIALS, dtype=jnp.int32)
            values = functools.reduce(
                lambda found, i: jnp.where(index == i, trials[i], found),
                range(1, NUM_TRIALS),
                jnp.full(NUM_TRIALS, trials[0]),
            )
            plgpu.store(trials_ref.at[jnp.full_like(index, row_index), index], values)
            if step:
                _store_values(intervals_ref, row_index, interval)


def _collect(logits_ref, rows_ref, top_k_ref, *refs):
    *state_refs, intervals_ref, collected_ref, counts_ref = refs
    chunk, row_index = pl.program_id(0), pl.program_id(1)
    row = _load_row_parameters(rows_ref, top_k_ref, row_index)

    @pl.when(row.is_active)
    def _():
        interval = _load_interval(row, state_refs, row_index, NUM_PASSES)
        # With a top-k, collect every token that top-k keeps, since top-p searches all these tokens.
        high = jnp.where(row.has_top_k, jnp.float32(jnp.inf), interval.high)

        shape = NUM_STRIPS, PACKED_TILE // NUM_STRIPS
        strip = chunk * NUM_STRIPS + lax.broadcasted_iota(jnp.int32, shape, 0)
        column = lax.broadcasted_iota(jnp.int32, strip.shape, 1)

        def load(turn, i):
            start = (turn * LOADS_IN_FLIGHT + i) * strip.shape[1]
            columns = strip * (CHUNK // NUM_STRIPS) + start + column
            live = columns < logits_ref.shape[1]
            index = jnp.full_like(columns, row_index), columns
            return plgpu.load(logits_ref.at[index], mask=live, other=-jnp.inf), live

        def pack(turn, counts):
            for logits, live in [load(turn, i) for i in range(LOADS_IN_FLIGHT)]:
                # An infinite `high` means no upper bound, so keep infinite logits too.
                wanted = live & (logits >= interval.low) & ((logits < high) | jnp.isinf(high))
                offset = counts[:, None] + jnp.cumsum(wanted.astype(jnp.int32), axis=1) - 1
                fits = wanted & (offset < STRIP_CAPACITY)
                index_in_strips = jnp.where(
                    fits, strip * STRIP_CAPACITY + offset, collected_ref.shape[1]
                )
                index = jnp.full_like(index_in_strips, row_index), index_in_strips
                plgpu.store(collected_ref.at[index], logits, mask=fits)
                counts = counts + jnp.sum(wanted.astype(jnp.int32), axis=1)
            return counts

        begin = jnp.zeros(NUM_STRIPS, jnp.int32)
        counts = lax.fori_loop(0, CHUNK // (PACKED_TILE * LOADS_IN_FLIGHT), pack, begin)
        own = chunk * NUM_STRIPS + jnp.arange(NUM_STRIPS, dtype=jnp.int32)
        plgpu.store(counts_ref.at[jnp.full_like(own, row_index), own], counts)
        pl.when(chunk == 0)(lambda: _store_values(intervals_ref, row_index, interval))


def _settle(
    logits_ref, rows_ref, top_k_ref, intervals_ref, collected_ref, counts_ref, threshold_ref
):
    row_index = pl.program_id(0)
    row = _load_row_parameters(rows_ref, top_k_ref, row_index)
    interval = _SearchInterval(*(intervals_ref[row_index, i] for i in range(4)))
    strips = counts_ref.shape[1]
    strip = jnp.arange(pl.next_power_of_2(strips), dtype=jnp.int32)
    index = jnp.full_like(strip, row_index), strip
    inside = strip < strips
    counts = plgpu.load(counts_ref.at[index], mask=row.is_active & inside, other=0)
    fits = jnp.max(counts) <= STRIP_CAPACITY

    def store(measure, base):
        threshold_ref[row_index] = _find_threshold(row, interval, measure, base)

    @pl.when(row.is_active & fits)
    def _():
        index_in_strips = jnp.arange(strip.shape[0] * STRIP_CAPACITY, dtype=jnp.int32)
        owner = lax.div(index_in_strips, jnp.int32(STRIP_CAPACITY))
        index = jnp.full_like(index_in_strips, row_index), owner
        inside = owner < strips
        count = plgpu.load(counts_ref.at[index], mask=inside, other=0)
        live = inside & (lax.rem(index_in_strips, jnp.int32(STRIP_CAPACITY)) < count)
        index = jnp.full_like(index_in_strips, row_index), index_in_strips
        logits = plgpu.load(collected_ref.at[index], mask=live, other=-jnp.inf)

        def measure(values):
            return jnp.sum(jnp.where(live, values(logits), jnp.float32(0)))

        store(measure, interval.above)

    @pl.when(row.is_active & ~fits)
    def _():
        def measure(values):
            def fold(tile, total):
                start = tile * WHOLE_ROW_TILE
                logits, live = _load_logits(logits_ref, row_index, start, WHOLE_ROW_TILE)
                return total + jnp.where(live, values(logits), jnp.float32(0))

            zeros = jnp.zeros(WHOLE_ROW_TILE, jnp.float32)
            return jnp.sum(
                lax.fori_loop(0, pl.cdiv(logits_ref.shape[1], WHOLE_ROW_TILE), fold, zeros)
            )

        store(measure, jnp.float32(0))


def _find_threshold(row, interval, measure, above):
    """Return the exact threshold of a row: the lowest logit that top-k and top-p keep.

    If the row has a top-k, search the threshold of top-k first. If the row has a top-p, then search
    the threshold of top-p among the tokens that remain.

    Args:
        row: Parameters of the row.
        interval: Search interval that contains the result of the first search.
        measure: Function that takes a function `values`, and returns the sum of `values(logits)`
            over the tokens that this launch reads.
        above: Probability of the tokens above the interval if `measure` leaves them out, else 0. It
            is only used if the row has no top-k.
    """

    def sum_reached(threshold, values):
        return measure(lambda logits: jnp.where(logits >= threshold, values(logits), 0.0))

    def count(logits):
        return jnp.ones_like(logits)

    low, high = _order_key(interval.low), _order_key(interval.high)

    def enough_tokens(threshold):
        return sum_reached(threshold, count) >= interval.target

    # Without a top-k, the result of top-p is at least `interval.low`, so start from there.
    top_k_threshold = lax.cond(
        row.has_top_k, lambda: _bisect(enough_tokens, low, high), lambda: interval.low
    )

    def weights(logits):
        return jnp.where(logits >= top_k_threshold, _token_weights(row, logits), jnp.float32(0))

    def top_p():
        def enough_mass(threshold):
            return base + sum_reached(threshold, weights) >= target

        base = jnp.where(row.has_top_k, jnp.float32(0), above)
        target = lax.cond(
            row.has_top_k, lambda: row.top_p * measure(weights), lambda: interval.target
        )
        # Always keep the most probable token, even if a tiny `top_p` rounds to 0 in float32.
        end = _order_key(row.max_logit) + 1
        end = jnp.where(row.has_top_k, end, jnp.minimum(high, end))
        return _bisect(enough_mass, jnp.where(row.has_top_k, _order_key(top_k_threshold), low), end)

    return lax.cond(row.top_p < 1.0, top_p, lambda: top_k_threshold)


def _bisect(holds, low, high):
    """Return the largest float for which `holds(float)` is true, by bisection.

    `low` and `high` are int32 keys that have the order of the floats (`_order_key`). The result has
    a key in [low, high). `holds` must be true for the float whose key is `low`. If `holds` is false
    for a float, `holds` must be false for all larger floats.
    """

    def middle(low, high):
        return (low & high) + lax.shift_right_arithmetic(low ^ high, 1)  # does not overflow

    def halve(bounds):
        key = middle(*bounds)
        does_hold = holds(_from_key(key))
        return jnp.where(does_hold, key, bounds[0]), jnp.where(does_hold, bounds[1], key)

    low, _ = lax.while_loop(lambda bounds: middle(*bounds) > bounds[0], halve, (low, high))
    return _from_key(low)


def _order_key(x):
    """Return int32 keys in the order of the floats; -0.0 and 0.0 have the same key."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_key(key):
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return lax.bitcast_convert_type(bits, jnp.float32)
