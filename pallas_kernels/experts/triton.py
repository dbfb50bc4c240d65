"""Kernels before and after the expert GEMMs, and an expert GEMM for any GPU, in Pallas Triton.

Each kernel has a grid of programs, and computes a result:

choose_experts  grid (token,)                     weights and indices of the chosen experts
sort_pairs      grid (block of results,)          pairs (token, choice) sorted by expert
expert_tiles    grid (block of tiles,)            list of tiles; the rows of a tile have one expert
gather_rows     grid (row,)                       rows of x, sorted by expert
combine_rows    grid (token, block of columns)    weighted sum of the rows of each token
grouped_gemm    grid (tile, block of columns)     product of each tile and its expert's weight
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# The list of tiles starts with `HEADER_SIZE` int32 words; the first word is the number of tiles.
HEADER_SIZE = 4
# After the header, the list of tiles has `TILE_FIELDS` int32 words per tile: expert, first row,
# number of rows, and an unused word.
TILE_FIELDS = 4
# `sort_pairs` compares every pair with every pair. On an H100, it takes 1.2 us for 8 pairs, 21 us
# for 8,192 pairs, and 62 us for 16,384 pairs. XLA's sort takes 8, 31 and 38 us for the same numbers
# of pairs.
MAX_SORTED_PAIRS = 8192
"""Maximum number of pairs (token, choice) that `sort_pairs` sorts."""
# A program of `sort_pairs` computes `_NUMBERS_PER_PROGRAM` integers: positions of pairs in the list
# that is sorted by expert, or offsets of experts in that list.
_NUMBERS_PER_PROGRAM = 16
_MAX_KEYS = 512  # A step of `sort_pairs` reads at most `_MAX_KEYS` keys.
_COMPARISONS_PER_THREAD = 64  # per step of `sort_pairs`
_TILES_PER_PROGRAM = 16
_ELEMENTS_PER_WARP = 32 * 8  # A thread handles 8 elements, which are 16 bytes for 2-byte dtypes.
_MAX_COLUMNS = 2048  # A step of a gather copies at most `_MAX_COLUMNS` columns.
_MIN_KEY, _MAX_KEY = -(1 << 31), (1 << 31) - 1  # lowest and highest int32
_GEMM_COLUMNS = 64
_GEMM_DEPTH = 32


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_local_experts",
        "num_choices",
        "softmax_first",
        "normalize",
        "scale",
        "interpret",
    ),
)
def choose_experts(
    logits,
    num_tokens,
    first_expert,
    *,
    num_local_experts: int,
    num_choices: int,
    softmax_first: bool,
    normalize: bool,
    scale: float | None,
    interpret: bool,
):
    """Return the weights [T, k] and the local indices [T, k] of the most probable experts.

    A local index counts from the first expert of the device. An expert that another device holds
    has the index `num_local_experts`. One program computes one row. `pallas_kernels.experts.route`
    documents the arguments.
    """
    num_rows = logits.shape[0]
    bounds = (
        jnp.int32(default) if bound is None else bound
        for bound, default in ((num_tokens, num_rows), (first_expert, 0))
    )
    kernel = functools.partial(
        _choose_kernel,
        num_local_experts=num_local_experts,
        softmax_first=softmax_first,
        normalize=normalize,
        scale=scale,
    )
    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_choices), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_choices), jnp.int32),
        ],
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(logits, *(bound.reshape(1) for bound in bounds))


def _choose_kernel(
    logits_ref,
    num_tokens_ref,
    first_expert_ref,
    weights_ref,
    experts_ref,
    *,
    num_local_experts,
    softmax_first,
    normalize,
    scale,
):
    token = pl.program_id(0)
    num_experts, num_choices = logits_ref.shape[1], weights_ref.shape[1]
    index = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    choice_index = jnp.arange(pl.next_power_of_2(num_choices), dtype=jnp.int32)
    is_expert, is_choice = index < num_experts, choice_index < num_choices
    source = logits_ref.at[jnp.full_like(index, token), index]
    values = plgpu.load(source, mask=is_expert, other=-jnp.inf).astype(jnp.float32)
    if softmax_first:
        values = _softmax(values, is_expert)

    def choose(choice, carry):
        keys, weights, experts = carry
        expert = jnp.min(jnp.where(keys == jnp.max(keys), index, keys.shape[0]))
        weight = jnp.sum(jnp.where(index == expert, values, 0))
        return (
            jnp.where(index == expert, _MIN_KEY, keys),
            jnp.where(choice_index == choice, weight, weights),
            jnp.where(choice_index == choice, expert, experts),
        )

    keys = jnp.where(is_expert, _ordered_keys(values), _MIN_KEY)
    zeros = jnp.zeros_like(choice_index)
    carry = keys, zeros.astype(jnp.float32), zeros
    _, weights, experts = lax.fori_loop(0, num_choices, choose, carry)
    if not softmax_first:
        weights = _softmax(weights, is_choice)
    if normalize:
        weights /= jnp.sum(weights)
    if scale is not None:
        weights *= jnp.float32(scale)
    experts -= first_expert_ref[0]
    has_expert = (experts >= 0) & (experts < num_local_experts) & (token < num_tokens_ref[0])
    experts = jnp.where(has_expert, experts, num_local_experts)
    for out_ref, out in ((weights_ref, weights), (experts_ref, experts)):
        target = out_ref.at[jnp.full_like(choice_index, token), choice_index]
        plgpu.store(target, out, mask=is_choice)


def _softmax(values, mask):
    """Return the softmax over the values where `mask` is true, and 0 where `mask` is false.

    If one of the values in the softmax is NaN, all results where `mask` is true are NaN.
    """
    values = jnp.where(mask, values, -jnp.inf)
    powers = jnp.exp(values - jnp.max(values))
    # On a GPU, the maximum above ignores NaN, but this sum makes the result NaN.
    return jnp.where(mask, powers / jnp.sum(jnp.where(mask, powers, 0)), 0)


def _ordered_keys(values):
    """Return an int32 key for each float32 value. The larger value has the larger key.

    The keys of -0.0 and 0.0 are equal, and the key of NaN is the largest.
    """
    bits = lax.bitcast_convert_type(values + 0.0, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ _MAX_KEY, bits)
    return jnp.where(values == values, keys, _MAX_KEY)


@functools.partial(jax.jit, static_argnames=("num_experts", "interpret"))
def sort_pairs(experts, *, num_experts: int, interpret: bool = False):
    """Sort the pairs (token, choice) by expert.

    The router chooses k experts for each of T tokens, which gives R = T * k pairs. The pair of
    token t and choice c has the index i = t * k + c and the sort key expert * R + i. The position
    of the pair in the sorted list is the number of lower keys. The offset of an expert is the
    number of keys below expert * R. A program computes `_NUMBERS_PER_PROGRAM` numbers: positions of
    pairs, or offsets of experts.

    Args:
        experts: Expert [T, k] of each pair: 0 to `num_experts`. The last index stands for no
            expert. (`num_experts` + 1) * R must be less than 2 ** 31.
        num_experts: Number of experts (E).
        interpret: Whether to run the kernel in interpret mode.

    Returns:
        The fields `order`, `positions` and `offsets` of a `Routing`.
    """
    num_pairs = experts.size
    num_keys = min(_MAX_KEYS, max(_NUMBERS_PER_PROGRAM, pl.next_power_of_2(num_pairs)))
    warps = max(1, _NUMBERS_PER_PROGRAM * num_keys // (32 * _COMPARISONS_PER_THREAD))
    order, positions, offsets = pl.pallas_call(
        functools.partial(_sort_kernel, num_keys=num_keys),
        out_shape=[
            jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
            jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
            jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32),
        ],
        grid=(pl.cdiv(num_pairs + num_experts + 1, _NUMBERS_PER_PROGRAM),),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="sort_pairs",
    )(experts.reshape(-1))
    return order, positions.reshape(experts.shape), offsets


def _sort_kernel(experts_ref, order_ref, positions_ref, offsets_ref, *, num_keys):
    num_pairs, num_offsets = experts_ref.shape[0], offsets_ref.shape[0]

    def load_keys(pairs, is_pair):
        return plgpu.load(experts_ref.at[pairs], mask=is_pair, other=0) * num_pairs + pairs

    index = jnp.arange(_NUMBERS_PER_PROGRAM, dtype=jnp.int32)
    index += pl.program_id(0) * _NUMBERS_PER_PROGRAM
    is_pair = index < num_pairs
    # In interpret mode, a store also writes the elements whose mask is false, and could overwrite a
    # new value with an old one. These elements therefore get an index past the end of the array,
    # where JAX ignores the store.
    expert = jnp.where(is_pair, num_offsets, index - num_pairs)
    bounds = jnp.where(is_pair, load_keys(index, is_pair), expert * num_pairs)

    def count(step, counts):
        pairs = jnp.arange(num_keys, dtype=jnp.int32) + step * num_keys
        keys = jnp.where(pairs < num_pairs, load_keys(pairs, pairs < num_pairs), _MAX_KEY)
        return counts + (keys[None, :] < bounds[:, None]).astype(jnp.int32)

    counts = jnp.zeros((_NUMBERS_PER_PROGRAM, num_keys), jnp.int32)
    counts = lax.fori_loop(0, pl.cdiv(num_pairs, num_keys), count, counts)
    counts = jnp.sum(counts, axis=1)
    plgpu.store(positions_ref.at[index], counts, mask=is_pair)
    plgpu.store(order_ref.at[jnp.where(is_pair, counts, num_pairs)], index, mask=is_pair)
    plgpu.store(offsets_ref.at[expert], counts, mask=expert < num_offsets)


def expert_gated_gemm(x, weight, routing, *, tile_rows: int, interpret: bool):
    """Run the public op `expert_gated_gemm` in Pallas Triton."""
    num_choices = routing.experts.shape[1]
    rows = gather_rows(x, routing.order, rows_per_token=num_choices, interpret=interpret)
    tiles = expert_tiles(
        routing.offsets, num_rows=rows.shape[0], tile_rows=tile_rows, interpret=interpret
    )
    options = {"tile_rows": tile_rows, "interpret": interpret}
    return grouped_gemm(rows, weight, tiles, gated=True, dtype=x.dtype, **options)


def expert_down_gemm(x, weight, routing, *, tile_rows: int, interpret: bool):
    """Run the public op `expert_down_gemm` in Pallas Triton."""
    tiles = expert_tiles(
        routing.offsets, num_rows=x.shape[0], tile_rows=tile_rows, interpret=interpret
    )
    options = {"tile_rows": tile_rows, "interpret": interpret}
    rows = grouped_gemm(x, weight, tiles, gated=False, dtype=x.dtype, **options)
    return combine_rows(rows, *choices(routing), dtype=x.dtype, interpret=interpret)


def choices(routing):
    """Return the fields of a `Routing` that `combine_rows` takes as arguments."""
    return routing.weights, routing.experts, routing.positions, routing.offsets


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the largest number of tiles that any routing of `num_rows` rows can have."""
    return num_rows // tile_rows + min(num_experts, num_rows)


@functools.partial(jax.jit, static_argnames=("num_rows", "tile_rows", "interpret"))
def expert_tiles(offsets, *, num_rows: int, tile_rows: int, interpret: bool = False):
    """Split the rows of each expert into tiles of at most `tile_rows` rows.

    Args:
        offsets: First row of each expert, and the end of the last expert's rows: int32 [E + 1].
        num_rows: Number of rows, padding included.
        tile_rows: Maximum number of rows per tile.
        interpret: Whether to run the kernel in interpret mode.

    Returns:
        int32 array: a header of `HEADER_SIZE` words, whose first word is the number of tiles, then
        `TILE_FIELDS` words per tile.
    """
    num_experts = offsets.shape[0] - 1
    num_programs = pl.cdiv(max_tiles(num_rows, num_experts, tile_rows), _TILES_PER_PROGRAM)
    size = HEADER_SIZE + num_programs * _TILES_PER_PROGRAM * TILE_FIELDS
    return pl.pallas_call(
        functools.partial(_tiles_kernel, tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((size,), jnp.int32),
        grid=(num_programs,),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="expert_tiles",
    )(offsets)


def _tiles_kernel(offsets_ref, tiles_ref, *, tile_rows):
    num_experts = offsets_ref.shape[0] - 1
    experts = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    is_expert = experts < num_experts
    first = plgpu.load(offsets_ref.at[experts], mask=is_expert, other=0)
    end = plgpu.load(offsets_ref.at[experts + 1], mask=is_expert, other=0)
    num_tiles = lax.div(end - first + (tile_rows - 1), jnp.int32(tile_rows))
    # Entry e of `ends` is the number of tiles of the experts 0 to e.
    ends = jnp.cumsum(num_tiles)
    total = jnp.sum(num_tiles)
    index = jnp.arange(_TILES_PER_PROGRAM, dtype=jnp.int32)
    index += pl.program_id(0) * _TILES_PER_PROGRAM
    is_before = ends[None, :] <= index[:, None]
    expert = jnp.sum((is_before & is_expert[None, :]).astype(jnp.int32), axis=1)
    tiles_before = jnp.max(jnp.where(is_before & is_expert[None, :], ends[None, :], 0), axis=1)
    is_tile = index < total
    expert_first = plgpu.load(offsets_ref.at[expert], mask=is_tile, other=0)
    expert_end = plgpu.load(offsets_ref.at[expert + 1], mask=is_tile, other=0)
    row = expert_first + (index - tiles_before) * tile_rows
    count = jnp.minimum(expert_end - row, tile_rows)
    for field, value in enumerate((expert, row, count)):
        plgpu.store(tiles_ref.at[HEADER_SIZE + index * TILE_FIELDS + field], value, mask=is_tile)
    # All programs store the same value, the total number of tiles, so the programs need no
    # synchronization.
    tiles_ref[0] = total


@functools.partial(jax.jit, static_argnames=("rows_per_token", "interpret"))
def gather_rows(x, order, *, rows_per_token: int, interpret: bool = False):
    """Return x[order // rows_per_token], [R, D]: the token's row for each pair (token, choice)."""
    num_rows, size = order.shape[0], x.shape[1]
    columns = min(_MAX_COLUMNS, pl.next_power_of_2(size))
    warps = max(1, min(8, columns // _ELEMENTS_PER_WARP))
    return pl.pallas_call(
        functools.partial(_gather_kernel, rows_per_token=rows_per_token, columns=columns),
        out_shape=jax.ShapeDtypeStruct((num_rows, size), x.dtype),
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="gather_rows",
    )(x, order)


def _gather_kernel(x_ref, order_ref, out_ref, *, rows_per_token, columns):
    size, row = x_ref.shape[1], pl.program_id(0)
    token = lax.div(order_ref[row], jnp.int32(rows_per_token))
    for start in range(0, size, columns):
        index = jnp.arange(columns, dtype=jnp.int32) + start
        mask = index < size if size % columns else None
        source = x_ref.at[jnp.full_like(index, token), index]
        values = plgpu.load(source, mask=mask)
        plgpu.store(out_ref.at[jnp.full_like(index, row), index], values, mask=mask)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def combine_rows(rows, weights, experts, positions, offsets, *, dtype, interpret: bool = False):
    """Return the weighted sum of each token's rows. The rows are added in the order of the token's
    choices of experts.

    Args:
        rows: Rows [R, D], sorted by expert.
        weights, experts, positions: Weight, expert and row of each choice, [T, k]. A choice whose
            expert is E (the number of experts) adds nothing.
        offsets: First row of each expert, [E + 1].
        dtype: Dtype of the result [T, D]; the sums are float32.
        interpret: Whether to run the kernel in interpret mode.
    """
    (num_tokens, _), size = weights.shape, rows.shape[1]
    columns = min(1024 if num_tokens > 64 else 256, pl.next_power_of_2(size))
    warps = max(1, min(8, columns // _ELEMENTS_PER_WARP))
    return pl.pallas_call(
        functools.partial(_combine_kernel, num_experts=offsets.shape[0] - 1, columns=columns),
        out_shape=jax.ShapeDtypeStruct((num_tokens, size), dtype),
        grid=(num_tokens, pl.cdiv(size, columns)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="combine_rows",
    )(rows, weights, experts, positions)


def _combine_kernel(
    rows_ref, weights_ref, experts_ref, positions_ref, out_ref, *, num_experts, columns
):
    size, token = rows_ref.shape[1], pl.program_id(0)
    index = jnp.arange(columns, dtype=jnp.int32) + pl.program_id(1) * columns
    mask = index < size
    total = jnp.zeros(columns, jnp.float32)
    for choice in range(weights_ref.shape[1]):
        is_real = experts_ref[token, choice] < num_experts
        position = jnp.where(is_real, positions_ref[token, choice], 0)
        source = rows_ref.at[jnp.full_like(index, position), index]
        values = plgpu.load(source, mask=mask & is_real, other=0).astype(jnp.float32)
        total += jnp.where(is_real, weights_ref[token, choice], 0) * values
    target = out_ref.at[jnp.full_like(index, token), index]
    plgpu.store(target, total.astype(out_ref.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=("gated", "dtype", "tile_rows", "interpret"))
def grouped_gemm(x, weight, tiles, *, gated: bool, dtype, tile_rows: int, interpret: bool = False):
    """Return the products of sorted rows and the weights of their experts, [R, F].

    Args:
        x: Rows [R, D], sorted by expert.
        weight: Weights [E, D, F], or [E, D, 2F] if gated.
        tiles: Result of `expert_tiles`.
        gated: Whether to return silu(gate) * up. The first F columns of the product are the gate,
            and the others are up.
        dtype: Dtype of the result. Rows that are in no tile are undefined.
        tile_rows: Maximum number of rows per tile: a power of two, at least 16.
        interpret: Whether to run the kernel in interpret mode.
    """
    num_tiles = max_tiles(x.shape[0], weight.shape[0], tile_rows)
    width = weight.shape[2] // (1 + gated)
    return pl.pallas_call(
        functools.partial(_gemm_kernel, gated=gated, tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), dtype),
        grid=(num_tiles, pl.cdiv(width, _GEMM_COLUMNS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="expert_gated_gemm" if gated else "expert_gemm",
    )(x, weight, tiles)


def _gemm_kernel(x_ref, weight_ref, tiles_ref, out_ref, *, gated, tile_rows):
    depth, width, tile = x_ref.shape[1], out_ref.shape[1], pl.program_id(0)
    first_column = pl.program_id(1) * _GEMM_COLUMNS

    @pl.when(tile < tiles_ref[0])
    def _multiply():
        first = HEADER_SIZE + tile * TILE_FIELDS
        expert, row, count = (tiles_ref[first + field] for field in range(3))
        member = jnp.arange(tile_rows, dtype=jnp.int32)
        is_row, rows = member < count, row + member
        columns = jnp.arange(_GEMM_COLUMNS, dtype=jnp.int32) + first_column
        is_column = columns < width

        def broadcast(index, axis, shape):
            return lax.broadcast_in_dim(index, shape, (axis,))

        def load(step, factor):
            inner = jnp.arange(_GEMM_DEPTH, dtype=jnp.int32) + step * _GEMM_DEPTH
            shape = _GEMM_DEPTH, _GEMM_COLUMNS
            source = weight_ref.at[
                jnp.full(shape, expert),
                broadcast(inner, 0, shape),
                broadcast(columns + factor * width, 1, shape),
            ]
            mask = (inner < depth)[:, None] & is_column[None, :]
            return plgpu.load(source, mask=mask, other=0)

        def add(step, sums):
            inner = jnp.arange(_GEMM_DEPTH, dtype=jnp.int32) + step * _GEMM_DEPTH
            shape = tile_rows, _GEMM_DEPTH
            source = x_ref.at[broadcast(rows, 0, shape), broadcast(inner, 1, shape)]
            mask = is_row[:, None] & (inner < depth)[None, :]
            x = plgpu.load(source, mask=mask, other=0)
            return [
                total + plgpu.dot(x, load(step, i), precision=lax.Precision.HIGHEST)
                for i, total in enumerate(sums)
            ]

        zeros = [jnp.zeros((tile_rows, _GEMM_COLUMNS), jnp.float32)] * (1 + gated)
        result, *up = lax.fori_loop(0, pl.cdiv(depth, _GEMM_DEPTH), add, zeros)
        if up:
            result *= up[0] / (1 + jnp.exp(-result))
        shape = tile_rows, _GEMM_COLUMNS
        target = out_ref.at[broadcast(rows, 0, shape), broadcast(columns, 1, shape)]
        plgpu.store(target, result.astype(out_ref.dtype), mask=is_row[:, None] & is_column[None, :])
