"""Tile operations of the Triton attention kernels: load, store, and the online softmax.

`fold_keys` is the loop body that both kernels run for each tile of keys, in registers:

    rows   = block_table[position // S] * S + position % S     one gather from the pool
    k, v   = pool rows
    scores = q . k, scaled, capped, masked, times log2(e)
    max, sum, out = online softmax, in exp2

Layout. The kernels see arrays as matrices with rows of H elements, a free reshape. The row of a
query is token * N + head; the row of a key is (block * S + offset) * K + KV head. Tiles have
power-of-two sides and at least 16 columns (FP8 pools: 32). Columns past the head size are masked.

Masking. A masked score is a large negative number instead of -inf, so a row that has seen no key
needs no special case. Whatever such a row accumulates is multiplied by exp2(MASKED_SCORE - score),
which is 0, when the row sees its first key.

FP8 pools. Keys and values are converted after the load. The scale of the keys multiplies the
scores, the scale of the values the output. For 16-bit queries the converted dtype is float16: it
represents every float8_e4m3fn number, and one instruction converts a pair. A conversion to bfloat16
takes three more instructions of a slow unit. Queries beyond 65,504 overflow in float16.

An FP8 pool stores two neighbouring columns as one 16-bit number. The reason is that the operands of
a tensor core move through shared memory in units of at least 16 bits. Separate bytes would be slow
for values, which are summed over keys. The kernels therefore multiply even and odd columns
separately: a tile of an FP8 pool is a tuple of two parts, and a tile of any other pool is a tuple
of one part.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.types import split_fp8_pairs

MASKED_SCORE = -1e30
_LOG2_E = math.log2(math.e)
_MIN_WIDTH = 16  # An operand of a tensor core has at least `_MIN_WIDTH` rows and columns.
EVICT_LAST = "evict_last"
"""L2 eviction policy for data that every layer of a step reads first: keep it as long as possible.

Without this policy, the weights and keys of one layer can evict that data before the next layer
reads it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static parameters of a Triton attention kernel.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        head_size: Elements of a head.
        block_size: Token slots of a block.
        table_width: Columns of the block tables.
        scale: Factor of the scores.
        soft_cap: Bound of the scores, or None.
        sliding_window: Number of tokens that a query sees, or None for all.
        is_scaled: Whether the pool is in FP8 with scales.
        interpret: Whether the kernel runs in the Pallas interpreter.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    table_width: int
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    is_scaled: bool = False
    interpret: bool = False

    @classmethod
    def for_pool(cls, num_heads, kv, block_tables, **fields):
        """Return the spec of a kernel that computes attention of `num_heads` query heads over the
        pool `kv`.

        `fields` are the fields that the pool and the block tables do not determine.
        """
        _, block_size, num_kv_heads, _ = kv.k.shape
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=kv.head_size,
            block_size=block_size,
            table_width=block_tables.shape[1],
            is_scaled=kv.is_scaled,
            **fields,
        )

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Number of columns of a tile: the head size rounded up to a power of two, at least 16.

        A tile of an FP8 pool has at least 32 columns: 16 even and 16 odd columns.
        """
        least = 2 * _MIN_WIDTH if self.is_scaled else _MIN_WIDTH
        return max(least, pl.next_power_of_2(self.head_size))


def load_rows(ref, rows, width, live=None):
    """Load the given rows of a matrix as a tile [len(rows), width].

    Rows where `live` is false, and columns past the matrix, are zeros. If `live` is None, all rows
    are loaded.
    """
    index, mask = _tile_index(ref, rows, width, live)
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0)


def store_rows(ref, rows, value, live):
    """Store a tile into the given rows of a matrix where `live` is true, in the matrix's dtype."""
    # The Pallas interpreter also stores masked rows, and could overwrite new values with old ones.
    # It ignores rows past the end of the matrix, so masked rows get an index past the end.
    rows = jnp.where(live, rows, ref.shape[0])
    index, mask = _tile_index(ref, rows, value.shape[1], live)
    plgpu.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def split_parts(x, spec):
    """Return the parts of a tile [rows, `spec.width`].

    For an FP8 pool the parts are the even columns and the odd columns. For any other pool the only
    part is the tile itself.
    """
    if not spec.is_scaled:
        return (x,)
    shape = x.shape[0], x.shape[1] // 2
    return tuple(part.reshape(shape) for part in lax.split(x.reshape(*shape, 2), (1, 1), axis=2))


def join_parts(parts):
    """Return the tile whose parts (see `split_parts`) are given."""
    if len(parts) == 1:
        return parts[0]
    pairs = jnp.concatenate([part[:, :, None] for part in parts], axis=2)
    return pairs.reshape(pairs.shape[0], -1)


def _load_parts(ref, rows, spec, live, dtype):
    """Load a tile of keys or values from the pool as parts in `dtype` (see `split_parts`).

    Rows where `live` is false are zeros.
    """
    if not spec.is_scaled:
        return (load_rows(ref, rows, spec.width, live).astype(dtype),)
    pairs = load_rows(ref, rows, spec.width // 2, live)
    if dtype == jnp.float16 and not spec.interpret:
        return tuple(_extract_pair_part(pairs, part) for part in ("even", "odd"))
    return tuple(part.astype(dtype) for part in split_fp8_pairs(pairs))


def _extract_pair_part(pairs, part):
    """Return the even or the odd columns of FP8 pairs, converted to float16.

    `part` is "even" or "odd". The compiler merges the byte permutations of the call for "even" and
    the call for "odd", so four numbers take three instructions. With `split_fp8_pairs`, they would
    take ten.
    """
    asm = f"""{{
        .reg .b32 parted;
        .reg .b16 even, odd;
        prmt.b32 parted, $1, 0, 0x3120;
        mov.b32 {{even, odd}}, parted;
        cvt.rn.f16x2.e4m3x2 $0, {part};
    }}"""
    result = [jax.ShapeDtypeStruct(pairs.shape, jnp.float16)]
    (half,) = plgpu.elementwise_inline_asm(
        asm, args=[pairs], constraints="=r,r", pack=2, result_shape_dtypes=result
    )
    return half


def repeat_rows(x, repeats):
    """Repeat each entry along axis 0 `repeats` times, as `jnp.repeat` does.

    Triton needs powers of two for the length of the axis and for `repeats`.
    """
    shape = (x.shape[0], repeats, *x.shape[1:])
    axes = (0, *range(2, len(shape)))
    return lax.broadcast_in_dim(x, shape, axes).reshape(-1, *x.shape[1:])


def begin_folds(q, carry, spec):
    """Return the arguments `q` and `carry` of the first call of `fold_keys`.

    The queries and the output become tuples of tiles (`split_parts`). For an FP8 pool, bfloat16
    queries are converted to float16.
    """
    if spec.is_scaled and q.dtype == jnp.bfloat16:
        q = q.astype(jnp.float16)
    row_max, row_sum, out = carry
    return split_parts(q, spec), (row_max, row_sum, split_parts(out, spec))


def end_folds(carry, v_scale=None):
    """Return the result of `fold_keys`, with the parts of the output joined to one tile.

    `v_scale`, if not None, is the scale of the values of an FP8 pool: the output is multiplied by
    it.
    """
    row_max, row_sum, parts = carry
    out = join_parts(parts)
    return row_max, row_sum, out if v_scale is None else out * v_scale


def fold_keys(carry, q, refs, sequence, head, positions, live, mask, spec, k_scale=None):
    """Update the running softmax (max, sum, output) with one tile of a sequence's keys.

    Args:
        carry: Running (max, sum, output), from `begin_folds` or the previous call.
        q: Tuple of query tiles, from `begin_folds`. For an FP8 pool, it has two tiles: the even
            columns and the odd columns. For any other pool, it has one tile [rows, `spec.width`].
        refs: Matrix of keys, matrix of values, and block tables [B * M].
        sequence: Index of the sequence.
        head: Index of the KV head.
        positions: Positions of the keys.
        live: Whether each position exists in the sequence. Keys and values at other positions are
            loaded as zeros. None means that all positions exist.
        mask: Function that returns which keys each row sees [rows, keys]. None means that all rows
            see all keys.
        spec: Static parameters of the kernel.
        k_scale: Scale of the keys of an FP8 pool, else None.

    Returns:
        The updated (max, sum, output).
    """
    k_ref, v_ref, tables_ref = refs
    size = jnp.int32(spec.block_size)
    # Use `lax.div` and not `//`, because `//` needs more instructions to round negative numbers.
    entries = sequence * spec.table_width + lax.div(positions, size)
    if live is None:
        blocks = plgpu.load(tables_ref.at[entries], eviction_policy=EVICT_LAST)
    else:
        blocks = plgpu.load(tables_ref.at[entries], mask=live, other=0, eviction_policy=EVICT_LAST)
    rows = (blocks * size + lax.rem(positions, size)) * spec.num_kv_heads + head
    keys = _load_parts(k_ref, rows, spec, live, q[0].dtype)
    visible = mask()
    dots = (_dot(part, key.T) for part, key in zip(q, keys, strict=True))
    scores = _scale_scores(functools.reduce(jnp.add, dots), spec, k_scale)
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.float32(MASKED_SCORE))
    values = _load_parts(v_ref, rows, spec, live, q[0].dtype)
    return _softmax_fold(carry, scores, values, spec)


def _dot(a, b):
    return plgpu.dot(a, b, precision=lax.Precision.HIGHEST)


def single_key_scores(q, key, spec, k_scale=None):
    """Return the float32 scores [rows] of one key [1, H], multiplied by log2(e)."""
    products = q.astype(jnp.float32) * key.astype(jnp.float32)
    return _scale_scores(jnp.sum(products, axis=1), spec, k_scale)


def _scale_scores(dots, spec, k_scale):
    def times(factor):
        return dots * (jnp.float32(factor) if k_scale is None else jnp.float32(factor) * k_scale)

    if spec.soft_cap is None:
        return times(spec.scale * _LOG2_E)
    return jnp.tanh(times(spec.scale / spec.soft_cap)) * jnp.float32(spec.soft_cap * _LOG2_E)


def softmax_start(num_rows, width):
    """Return the running softmax (max, sum, output) before the first key."""
    row_max = jnp.full((num_rows,), MASKED_SCORE, jnp.float32)
    out = jnp.zeros((num_rows, width), jnp.float32)
    return row_max, jnp.zeros((num_rows,), jnp.float32), out


def softmax_start_from(score, value, seen):
    """Return the running softmax (max, sum, output) after one key.

    Args:
        score: Scores of the key [rows].
        value: Value of the key [1, H].
        seen: Whether the rows see the key. Rows that do not see the key get the result of
            `softmax_start`.
    """
    shape = (score.shape[0], value.shape[1])
    out = jnp.broadcast_to(value.astype(jnp.float32), shape)
    row_sum = jnp.where(seen, jnp.ones_like(score), jnp.zeros_like(score))
    out = jnp.where(seen, out, jnp.zeros_like(out))
    return jnp.where(seen, score, jnp.full_like(score, MASKED_SCORE)), row_sum, out


def _softmax_fold(carry, scores, values, spec):
    row_max, row_sum, outs = carry
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
    rescale = _exp2(row_max - new_max, spec)
    weights = _exp2(scores - new_max[:, None], spec)
    row_sum = row_sum * rescale + jnp.sum(weights, axis=1)
    weights = weights.astype(values[0].dtype)
    updates = [_dot(weights, part) for part in values]
    outs = tuple(out * rescale[:, None] + update for out, update in zip(outs, updates, strict=True))
    return new_max, row_sum, outs


def _exp2(x, spec):
    """Return 2 ** x. With an FP8 pool, results below 2 ** -126 (subnormal numbers) become 0.

    The number of instructions limits the speed of the loop over an FP8 pool. To return subnormal
    numbers, the compiler would emit three more instructions.
    """
    if not spec.is_scaled or spec.interpret:
        return jnp.exp2(x)
    asm, result = "ex2.approx.ftz.f32 $0, $1;", [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    options = {"constraints": "=f,f", "pack": 1, "result_shape_dtypes": result}
    return plgpu.elementwise_inline_asm(asm, args=[x], **options)[0]


def softmax_finish(carry):
    """Return the output rows of the running softmax; zeros for rows that saw no key."""
    _, row_sum, out = carry
    return out / jnp.where(row_sum == 0, jnp.float32(1), row_sum)[:, None]


def _tile_index(ref, rows, width, live):
    """Return the indices with which a tile is loaded or stored, and the mask.

    The indices are two arrays with the shape of the tile: the row and the column of each element.
    The mask is None if no element needs a mask.
    """
    shape = (rows.shape[0], width)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = None if live is None else jnp.broadcast_to(live[:, None], shape)
    if width != ref.shape[1]:
        inside = columns < ref.shape[1]
        mask = inside if mask is None else mask & inside
    return (jnp.broadcast_to(rows[:, None], shape), columns), mask
