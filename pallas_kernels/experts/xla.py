"""Routing and expert GEMMs in plain XLA.

The GEMMs run a loop over tiles. A tile has a fixed number of rows of one expert, so the loop reads
only the weights of experts with at least one row. The number of tiles is known at run time.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm.xla import einsum, map_row_tiles

MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 128
"""Bounds of the number of rows of a tile."""


def choose_experts(logits, num_choices, *, softmax_first, normalize, scale):
    """Return the weights [T, k] and the indices [T, k] of the most probable experts.

    With `softmax_first`, experts whose probabilities round to 0 count as equal.

    `pallas_kernels.experts.route` documents the arguments.
    """
    values = logits.astype(jnp.float32)
    if softmax_first:
        values = jax.nn.softmax(values, axis=-1)
    weights, experts = lax.top_k(values, num_choices)
    if not softmax_first:
        weights = jax.nn.softmax(weights, axis=-1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if scale is not None:
        weights = weights * jnp.float32(scale)
    return weights, experts


def sort_by_expert(experts, num_experts, num_tokens=None):
    """Sort the pairs (token, choice) by expert.

    Args:
        experts: Expert index [T, k] of each pair, counted from the first expert of the device. A
            pair with an index below 0 or above `num_experts` - 1 is routed to no expert.
        num_experts: Number of experts of the device (E).
        num_tokens: Number of tokens; later rows are padding. None means no padding.

    Returns:
        All fields of a `Routing` except `weights`, in order.
    """
    (num_rows, num_choices), num_pairs = experts.shape, experts.size
    has_expert = (experts >= 0) & (experts < num_experts)
    if num_tokens is not None:
        has_expert &= jnp.arange(num_rows, dtype=jnp.int32)[:, None] < num_tokens
    experts = jnp.where(has_expert, experts, num_experts).astype(jnp.int32)
    pairs = jnp.arange(num_pairs, dtype=jnp.int32)
    # Sort one array of distinct keys, which is faster than a stable sort of keys and values.
    order = lax.sort(experts.reshape(-1) * num_pairs + pairs, is_stable=False) % max(num_pairs, 1)
    positions = jnp.zeros(num_pairs, jnp.int32).at[order].set(pairs, unique_indices=True)
    is_expert = experts.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32)[None]
    counts = jnp.sum(is_expert, axis=0, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return experts, order, positions.reshape(num_rows, num_choices), offsets


def expert_gated_gemm(x, weight, routing, *, batch_invariant):
    """Run the public op `expert_gated_gemm` in plain XLA."""

    def multiply(expert, tokens):
        own_weight = expert_weight(weight, expert)
        return einsum("td,df->tf", take_rows(x, tokens), own_weight, out=jnp.float32)

    width = weight.shape[2] // 2
    return gated_rows(multiply, routing, width, x.dtype, batch_invariant=batch_invariant)


def expert_down_gemm(x, weight, routing, *, batch_invariant):
    """Run the public op `expert_down_gemm` in plain XLA."""

    def multiply(expert, rows):
        own_weight = expert_weight(weight, expert)
        return einsum("tf,fd->td", take_rows(x, rows), own_weight, out=jnp.float32)

    width = weight.shape[2]
    return sum_choices(multiply, routing, width, x.dtype, batch_invariant=batch_invariant)


def gated_rows(multiply, routing, width, dtype, *, batch_invariant=False):
    """Return silu(gate) * up for each token and chosen expert, [R, width], sorted by expert.

    Rows that are routed to no expert of this device are undefined.

    Args:
        multiply: Function of an expert and of token indices that returns gate and up, concatenated
            along the columns, in float32.
        routing: The `Routing`.
        width: Width of the result.
        dtype: Dtype of the result.
        batch_invariant: See `map_tiles`.
    """
    num_choices = routing.experts.shape[1]

    def compute_tile(expert, rows):
        gate_up = multiply(expert, take_rows(routing.order, rows) // num_choices)
        gate, up = jnp.split(gate_up, 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(dtype)

    return map_tiles(compute_tile, routing, width, dtype, batch_invariant=batch_invariant)


def sum_choices(multiply, routing, width, dtype, *, batch_invariant=False):
    """Return, for each token, the weighted sum [T, width] of the results of its experts.

    A pair is a token and one expert that the router chose for it. `multiply` computes the result
    row of each pair. Each result row is rounded to `dtype` and multiplied by the pair's routing
    weight. The rows of each token are then added in float32.

    Args:
        multiply: Function that returns the result rows of pairs in float32. It takes an expert and
            the positions of the pairs in the list of all pairs, which is sorted by expert.
        routing: The `Routing`.
        width: Width of the result.
        dtype: Dtype of the result.
        batch_invariant: See `map_tiles`.
    """

    def compute_tile(expert, rows):
        return multiply(expert, rows).astype(dtype)

    products = map_tiles(compute_tile, routing, width, dtype, batch_invariant=batch_invariant)
    has_expert = routing.experts < routing.offsets.shape[0] - 1

    def add_choices(has_expert, positions, weights):
        total = jnp.zeros((has_expert.shape[0], width), jnp.float32)
        for choice in range(has_expert.shape[1]):
            rows = take_rows(products, positions[:, choice]).astype(jnp.float32)
            total += jnp.where(has_expert[:, choice, None], rows * weights[:, choice, None], 0)
        return total.astype(dtype)

    arrays = has_expert, routing.positions, routing.weights
    # XLA may fuse a multiplication and an addition, which rounds only once. Whether XLA does so can
    # depend on the number of rows, so a batch-invariant result needs tiles of a fixed size.
    return map_row_tiles(add_choices, *arrays) if batch_invariant else add_choices(*arrays)


def expert_weight(weight, expert):
    """Return the weight of one expert.

    On a CPU, XLA converts bfloat16 and FP8 weights to float32. Without the optimization barrier,
    XLA would convert the weights of all experts before the loop over tiles.
    """
    weight, expert = lax.optimization_barrier((weight, expert))
    return weight[expert]


def map_tiles(compute_tile, routing, width, dtype, *, batch_invariant):
    """Return the rows [R, width] of all tiles, sorted by expert.

    Rows that are routed to no expert of this device are undefined.

    Args:
        compute_tile: Function of an expert and of row indices that returns the tile's rows.
        routing: The `Routing`.
        width: Width of the result.
        dtype: Dtype of the result.
        batch_invariant: Whether tiles have a fixed number of rows, so that a row's bits do not
            depend on the number of rows.
    """
    offsets, num_rows = routing.offsets, routing.order.shape[0]
    tile_rows = _num_tile_rows(num_rows, offsets.shape[0] - 1)
    tile_rows = MIN_TILE_ROWS if batch_invariant else tile_rows
    num_tiles = (offsets[1:] - offsets[:-1] + tile_rows - 1) // tile_rows
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    steps = jnp.arange(tile_rows, dtype=jnp.int32)

    def write_tile(index, out):
        expert = jnp.sum(tile_ends <= index, dtype=jnp.int32)
        tile = index - (tile_ends[expert] - num_tiles[expert])
        first = offsets[expert] + tile * tile_rows
        # A tile may extend past the last row of its expert. The next tile overwrites these rows.
        return lax.dynamic_update_slice(out, compute_tile(expert, first + steps), (first, 0))

    out = jnp.zeros((num_rows + tile_rows, width), dtype)
    return lax.fori_loop(jnp.int32(0), tile_ends[-1], write_tile, out)[:num_rows]


def _num_tile_rows(num_rows, num_experts):
    """Return the number of rows per tile, if `num_rows` rows belong to `num_experts` experts.

    The number is the next power of two above the mean number of rows per expert, from
    `MIN_TILE_ROWS` to `MAX_TILE_ROWS`.
    """
    mean = max(num_rows // num_experts, 1)
    return min(max(1 << mean.bit_length(), MIN_TILE_ROWS), MAX_TILE_ROWS)


def take_rows(array, rows):
    """Return the given rows of an array; an index past the end gives the last row."""
    return jnp.take(array, rows, axis=0, mode="clip")
