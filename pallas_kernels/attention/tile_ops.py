"""What the Triton attention kernels share, all on values in registers: `fold_keys` is the body of
their loops over tiles of keys.

    rows   = block_table[position // S] * S + position % S     of the pool, one gather
    k, v   = pool rows
    scores = q . k, scaled, capped, masked                      in units of log2 e
    max, sum, out = online softmax, in exp2

Keys and values of a scaled pool are converted once they are loaded; their scales are factors of the
scores and of the output. They become float16 where the queries have 16 bits: every number of
float8_e4m3fn is one of float16 too, a pair of them takes one instruction, and bfloat16 takes three
of a slow unit more. Queries beyond 65,504 overflow in it.

A scaled pool has two neighbours of a row as one number of 16 bits, since a tensor core's factors
are brought to their places in shared memory and registers by 16 bits at least: the values, which
are summed over keys, one byte at a time otherwise. So rows are multiplied in two parts, their even
and their odd columns, and a tile of such rows is a tuple of two; of others, of one.

Arrays are seen as matrices of rows of H elements (a free reshape outside the kernel): q's row is
token * N + head, the pool's is (block * S + offset) * K + KV head. Tiles have power-of-two sides,
and 16 columns at least in a part: those past the head size are masked. A masked-out score is a
large negative number instead of -inf, so that a row with no key yet needs no special case: what it
gathers meanwhile is scaled by exp2(MASKED - score) = 0 as soon as it sees its first key.
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
_MIN_WIDTH = 16  # of either factor of a tensor core's GEMM
EVICT_LAST = "evict_last"
"""How the L2 is to treat what each layer of a step reads anew and waits for before all else: as the
last to make room. A layer's weights and keys may be more than it holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a program knows when it is compiled."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    table_width: int
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    is_scaled: bool = False  # whether the pool is
    interpret: bool = False

    @classmethod
    def for_pool(cls, num_heads, kv, block_tables, **fields):
        """Of `num_heads` query heads over a pool."""
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
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Columns of a tile of heads: a power of two, a tensor core's in each part at least."""
        least = 2 * _MIN_WIDTH if self.is_scaled else _MIN_WIDTH
        return max(least, pl.next_power_of_2(self.head_size))


def load_rows(ref, rows, width, live=None):
    """Tile [len(rows), width] of a matrix; zeros where not live and past the matrix' columns."""
    index, mask = _tile_index(ref, rows, width, live)
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0)


def store_rows(ref, rows, value, live):
    """The inverse of `load_rows`, in ref's dtype."""
    # The interpreter writes old values back where the mask is off, over rows just written if their
    # indices meet; outside the matrix it writes nothing.
    rows = jnp.where(live, rows, ref.shape[0])
    index, mask = _tile_index(ref, rows, value.shape[1], live)
    plgpu.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def split_parts(x, spec):
    """The parts of rows [rows, `spec.width`]."""
    if not spec.is_scaled:
        return (x,)
    shape = x.shape[0], x.shape[1] // 2
    return tuple(part.reshape(shape) for part in lax.split(x.reshape(*shape, 2), (1, 1), axis=2))


def join_parts(parts):
    """The rows of these parts."""
    if len(parts) == 1:
        return parts[0]
    pairs = jnp.concatenate([part[:, :, None] for part in parts], axis=2)
    return pairs.reshape(pairs.shape[0], -1)


def _load_parts(ref, rows, spec, live, dtype):
    """Parts of a tile of the pool's keys or values, in `dtype`; zeros where not live."""
    if not spec.is_scaled:
        return (load_rows(ref, rows, spec.width, live).astype(dtype),)
    pairs = load_rows(ref, rows, spec.width // 2, live)
    if dtype == jnp.float16 and not spec.interpret:
        return tuple(_extract_pair_part(pairs, part) for part in ("even", "odd"))
    return tuple(part.astype(dtype) for part in split_fp8_pairs(pairs))


def _extract_pair_part(pairs, part):
    """`split_fp8_pairs` in float16, one of them: four numbers in three instructions, as the second
    part's permutation is the first one's. From two masks and shifts the compiler makes ten."""
    asm = f"""{{
        .reg .b32 parted;
        .reg .b16 even, odd;
        prmt.b32 parted, $1, 0, 0x3120;
        mov.b32 {{even, odd}}, parted;
        cvt.rn.f16x2.e4m3x2 $0, {part};
    }}"""
    result = [jax.ShapeDtypeStruct(pairs.shape, jnp.float16)]
    (own,) = plgpu.elementwise_inline_asm(
        asm, args=[pairs], constraints="=r,r", pack=2, result_shape_dtypes=result
    )
    return own


def repeat_rows(x, repeats):
    """Each entry along the first axis so many times, one after the other; of powers of two."""
    shape = (x.shape[0], repeats, *x.shape[1:])
    axes = (0, *range(2, len(shape)))
    return lax.broadcast_in_dim(x, shape, axes).reshape(-1, *x.shape[1:])


def begin_folds(q, carry, spec):
    """Queries and the running (max, sum, output) as `fold_keys` takes them, in parts."""
    if spec.is_scaled and q.dtype == jnp.bfloat16:
        q = q.astype(jnp.float16)
    row_max, row_sum, out = carry
    return split_parts(q, spec), (row_max, row_sum, split_parts(out, spec))


def end_folds(carry, v_scale=None):
    """The running (max, sum, output) after them, of values stored divided by `v_scale`, if any."""
    row_max, row_sum, parts = carry
    out = join_parts(parts)
    return row_max, row_sum, out if v_scale is None else out * v_scale


def fold_keys(carry, q, refs, sequence, head, positions, live, mask, spec, k_scale=None):
    """Fold one tile of a sequence's keys into the running (max, sum, output).

    Args:
        carry: as of `begin_folds`.
        q: [rows, H], likewise.
        refs: the keys' and the values' matrix, and the block tables [B * M].
        sequence, head: whose keys.
        positions: of the keys.
        live: which of them there are; None: all. The others are loaded as zeros.
        mask: called for which of them each row sees, [rows, keys], or None: all.
        spec: an `AttentionSpec`.
        k_scale: of a scaled pool's keys.
    """
    k_ref, v_ref, tables_ref = refs
    size = jnp.int32(spec.block_size)
    # Not // and %: they also handle negative numbers, which costs instructions.
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
    """Scores of one key [1, H], in units of log2 e: float32 [rows]."""
    products = q.astype(jnp.float32) * key.astype(jnp.float32)
    return _scale_scores(jnp.sum(products, axis=1), spec, k_scale)


def _scale_scores(dots, spec, k_scale):
    def times(factor):
        return dots * (jnp.float32(factor) if k_scale is None else jnp.float32(factor) * k_scale)

    if spec.soft_cap is None:
        return times(spec.scale * _LOG2_E)
    return jnp.tanh(times(spec.scale / spec.soft_cap)) * jnp.float32(spec.soft_cap * _LOG2_E)


def softmax_start(num_rows, width):
    """Running (max, sum, output) before the first key."""
    row_max = jnp.full((num_rows,), MASKED_SCORE, jnp.float32)
    out = jnp.zeros((num_rows, width), jnp.float32)
    return row_max, jnp.zeros((num_rows,), jnp.float32), out


def softmax_start_from(score, value, seen):
    """The same after one key, of `score` [rows] and `value` [1, H], if that is seen."""
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
    outs = tuple(out * rescale[:, None] + own for out, own in zip(outs, updates, strict=True))
    return new_max, row_sum, outs


def _exp2(x, spec):
    """2 ** x. Over a scaled pool, where its instructions are what bounds the loop, results below
    2 ** -126, which are no normal numbers, become 0: for those the compiler has three more."""
    if not spec.is_scaled or spec.interpret:
        return jnp.exp2(x)
    asm, result = "ex2.approx.ftz.f32 $0, $1;", [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    options = {"constraints": "=f,f", "pack": 1, "result_shape_dtypes": result}
    return plgpu.elementwise_inline_asm(asm, args=[x], **options)[0]


def softmax_finish(carry):
    """The output rows; zeros for rows that saw no key."""
    _, row_sum, out = carry
    return out / jnp.where(row_sum == 0, jnp.float32(1), row_sum)[:, None]


def _tile_index(ref, rows, width, live):
    """Indices and mask of a tile: every index has the tile's full shape, as Pallas wants it."""
    shape = (rows.shape[0], width)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = None if live is None else jnp.broadcast_to(live[:, None], shape)
    if width != ref.shape[1]:
        inside = columns < ref.shape[1]
        mask = inside if mask is None else mask & inside
    return (jnp.broadcast_to(rows[:, None], shape), columns), mask
