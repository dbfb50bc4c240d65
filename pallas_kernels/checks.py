"""Argument checks of the public entries, and of kernels that have sizes of their own.

They see static facts only (shapes, dtypes, Python numbers), so they cost nothing inside `jax.jit`
and hold for tracers. Each error names the parameter, its value and the remedy.
"""

import math

import jax.numpy as jnp

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MAX_BLOCK_SIZE = 256


def check_pool(kv, name="kv"):
    """Refuse a pool of a wrong rank, dtype or block size, or of heads without elements."""
    k, v = kv
    _check_rank(f"{name}.k", k, 4, "[P, S, K, H]")
    _check_shape(f"{name}.v", v, k.shape, f"{name}.k's shape")
    if k.dtype not in DTYPES:
        raise TypeError(f"{name}.k has dtype {k.dtype}; make the pool bfloat16, float16 or float32")
    _check_dtype(f"{name}.v", v, k.dtype, f"{name}.k's dtype")
    if not 1 <= k.shape[1] <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block size {k.shape[1]} ({name}.k.shape[1]) must be from 1 to {MAX_BLOCK_SIZE}"
        )
    if not k.shape[3]:
        raise ValueError(f"head size 0 ({name}.k.shape[3]) must be at least 1")


def _check_attended(kv, backend):
    """The same, and heads that the back end's attention takes."""
    check_pool(kv)
    head_size, most = kv.k.shape[3], backend.max_head_size
    if most is not None and head_size > most:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be from 1 to {most} for the back end "
            f"{backend.value!r}; 'xla' takes any"
        )


def check_attention(q, kv, block_tables, seq_lens, backend, scalars):
    """What decode and prefill attention have in common; `scalars` are scale, soft cap and sliding
    window."""
    _check_attended(kv, backend)
    num_kv_heads, head_size = kv.k.shape[2:]
    _check_rank("q", q, 3, "[rows, N, H]")
    _check_dtype("q", q, kv.k.dtype, "the pool's dtype; cast it first")
    if q.shape[2] != head_size:
        raise ValueError(
            f"q has head size {q.shape[2]} and the pool {head_size}; they must be equal"
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} query heads, not a multiple of the pool's {num_kv_heads} KV heads"
        )
    _check_sequences(block_tables, seq_lens)
    _check_scalars(*scalars)
    if q.shape[0] and not block_tables.shape[0]:
        raise ValueError(f"block_tables has no rows for q's {q.shape[0]}; give one row a sequence")


def _check_sequences(block_tables, seq_lens):
    _check_int32("block_tables", block_tables, 2, "[B, M]")
    _check_int32("seq_lens", seq_lens, 1, "[B]")
    _check_shape("seq_lens", seq_lens, block_tables.shape[:1], "block_tables' first axis")


def check_decode(q, block_tables):
    """One query row a sequence."""
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows for {block_tables.shape[0]} block tables; "
            "decode takes one token a sequence (use paged_prefill_attention for more)"
        )


def check_prefill(query_start_loc, seq_lens):
    """One more start than there are sequences."""
    _check_int32("query_start_loc", query_start_loc, 1, "[B + 1]")
    want = (seq_lens.shape[0] + 1,)
    _check_shape("query_start_loc", query_start_loc, want, "one entry more than seq_lens")


def check_write(kv, k, v, slot_mapping):
    """New keys and values fit the pool's rows."""
    check_pool(kv)
    _check_int32("slot_mapping", slot_mapping, 1, "[T]")
    want = (*slot_mapping.shape, *kv.k.shape[2:])
    for name, array in (("k", k), ("v", v)):
        _check_shape(name, array, want, "[tokens of slot_mapping, pool's KV heads, head size]")
        _check_dtype(name, array, kv.k.dtype, "the pool's dtype; cast it first")


def check_rope_write(qkv, kv, slot_mapping, angles, norms, dtype):
    """Fused projections hold the pool's heads and at least one query head for each."""
    _check_rope(qkv, kv, angles, norms, dtype)
    _check_int32("slot_mapping", slot_mapping, 1, "[T]")
    _check_shape("slot_mapping", slot_mapping, qkv.shape[1:2], "qkv's tokens")


def check_rope_decode(qkv, kv, block_tables, seq_lens, angles, norms, dtype, backend, scalars):
    """The same of one token a sequence; `scalars` as of `check_attention`."""
    _check_attended(kv, backend)
    _check_rope(qkv, kv, angles, norms, dtype)
    _check_sequences(block_tables, seq_lens)
    _check_shape("seq_lens", seq_lens, qkv.shape[1:2], "one token a sequence, qkv's second axis")
    _check_scalars(*scalars)


def _check_rope(qkv, kv, angles, norms, dtype):
    check_pool(kv)
    num_kv_heads, head_size = kv.k.shape[2:]
    _check_parts("qkv", qkv, 4, "[parts, T, N + 2K, H]", dtype)
    num_heads = qkv.shape[2] - 2 * num_kv_heads
    if head_size % 2:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be even: channels are rotated in pairs"
        )
    if qkv.shape[3] != head_size:
        raise ValueError(
            f"qkv has head size {qkv.shape[3]} and the pool {head_size}; they must be equal"
        )
    if num_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"qkv has {qkv.shape[2]} heads; with the pool's {num_kv_heads} KV heads it must have "
            "twice as many and a multiple of them for the queries"
        )
    for name, angle in zip(("angles[0]", "angles[1]"), angles or (), strict=angles is not None):
        _check_shape(name, angle, (qkv.shape[1], head_size // 2), "[T, H / 2]")
        _check_dtype(name, angle, jnp.float32, "rotations are float32")
    if norms is not None:
        for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
            _check_shape(name, weight, (head_size,), "[H]")
            _check_dtype(name, weight, dtype, "the queries' dtype")
        _check_eps("norms.eps", norms.eps)


def check_add_norm(hidden, update, weight, eps):
    """Rows of one shape and dtype, and a weight a column."""
    _check_float("hidden", hidden, 2, "[T, D]")
    _check_parts("update", update, 3, "[parts, T, D]", hidden.dtype)
    want = (update.shape[0], *hidden.shape)
    _check_shape("update", update, want, "hidden's shape after the parts")
    _check_shape("weight", weight, hidden.shape[1:], "[D]")
    _check_dtype("weight", weight, hidden.dtype, "hidden's dtype; cast it first")
    _check_eps("eps", eps)


def check_gated(gate_up):
    """Rows of a gate and as many other factors."""
    _check_float("gate_up", gate_up, 3, "[T, 2, F]")
    want = (gate_up.shape[0], 2, gate_up.shape[2])
    _check_shape("gate_up", gate_up, want, "gate and up")


def check_copy(pool, src, dst):
    """Every layer has the same pool shape, every source a destination."""
    if not pool:
        raise ValueError("pool has no layers; pass one LayerKV a layer")
    for index, layer in enumerate(pool):
        check_pool(layer, f"pool[{index}]")
        _check_shape(f"pool[{index}].k", layer.k, pool[0].k.shape, "pool[0].k's shape")
        _check_dtype(f"pool[{index}].k", layer.k, pool[0].k.dtype, "pool[0].k's dtype")
    _check_int32("src", src, 1, "[C]")
    _check_int32("dst", dst, 1, "[C]")
    _check_shape("dst", dst, src.shape, "src's shape")


def _check_rank(name, array, rank, axes):
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {axes}")


def _check_shape(name, array, want, why):
    if tuple(array.shape) != tuple(want):
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {tuple(want)} ({why})")


def _check_dtype(name, array, want, why):
    if array.dtype != want:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {want} ({why})")


def _check_float(name, array, rank, axes):
    _check_rank(name, array, rank, axes)
    if array.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or float32; cast it"
        )


def _check_parts(name, array, rank, axes, dtype):
    """A product in parts: of the dtype of its sum, or float32."""
    _check_float(name, array, rank, axes)
    if jnp.dtype(dtype) not in DTYPES or array.dtype not in (dtype, jnp.float32):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {dtype} or float32; cast it")
    if not array.shape[0]:
        raise ValueError(f"{name} has no parts; it must be {axes} with at least one")


def _check_logits(logits):
    _check_rank("logits", logits, 2, "[B, V]")
    _check_dtype("logits", logits, jnp.float32, "sampling computes in float32; cast it first")


def check_truncation(logits, temperature, min_p, top_k, top_p):
    """A matrix of logits, and a number a row."""
    _check_logits(logits)
    rows = {"temperature": temperature, "min_p": min_p, "top_p": top_p}
    for name, array in rows.items():
        _check_shape(name, array, logits.shape[:1], "one a row of logits")
        _check_dtype(name, array, jnp.float32, "as the logits; cast it first")
    _check_int32("top_k", top_k, 1, "[B]")
    _check_shape("top_k", top_k, logits.shape[:1], "one a row of logits")


def check_adjustments(logits, adjustments):
    """A matrix of logits, and adjustments of its rows and tokens."""
    _check_logits(logits)
    if adjustments is None:
        return
    batch, width = logits.shape
    state = adjustments.words.shape[0], width
    _check_int32("words", adjustments.words, 2, "[R, V]")
    _check_shape("words", adjustments.words, state, "a word for each token")
    _check_shape("biases", adjustments.biases, state, "as the words")
    for name in ("rows", "kinds"):
        _check_int32(name, getattr(adjustments, name), 1, "[B]")
        _check_shape(name, getattr(adjustments, name), (batch,), "one a row of logits")
    _check_shape("penalties", adjustments.penalties, (batch, 3), "three a row of logits")


def check_scores(logits, token_ids, wanted, count):
    """A matrix of logits, and a mark a row; a token, too, unless it is None."""
    _check_logits(logits)
    if token_ids is not None:
        _check_int32("token_ids", token_ids, 1, "[T]")
        _check_shape("token_ids", token_ids, logits.shape[:1], "one a row of logits")
    _check_shape("wanted", wanted, logits.shape[:1], "one a row of logits")
    if count < 0:
        raise ValueError(f"count={count} is negative: 0 asks for no other tokens")


def check_product(x, weight):
    """Two matrices of one dtype that can be multiplied."""
    _check_float("x", x, 2, "[T, C]")
    _check_rank("weight", weight, 2, "[C, D]")
    _check_shape("weight", weight, (x.shape[1], weight.shape[1]), "x's columns first")
    _check_dtype("weight", weight, x.dtype, "x's dtype; cast it first")


def check_gated_product(x, weight):
    """A row's depth is the weight's, which has two factors."""
    _check_float("x", x, 2, "[T, D]")
    _check_rank("weight", weight, 3, "[D, 2, F]")
    want = (x.shape[1], 2, weight.shape[2])
    _check_shape("weight", weight, want, "x's columns first, gate and up")
    _check_dtype("weight", weight, x.dtype, "x's dtype; cast it first")


def check_whole_tiles(sizes, tile):
    """Refuse rows, depth and width that are not whole tiles, for a kernel that has no others."""
    if any(size % part for size, part in zip(sizes, tile, strict=True)):
        raise ValueError(
            f"rows, depth and width are {sizes}; they must be whole tiles of {tile}: call the "
            "public entry, which chooses a kernel that fits"
        )


def check_between(attended, hidden, weights, num_rows, exchange, eps):
    """A layer's weights that fit each other and the rows."""
    _check_float("hidden", hidden, 2, "[T, D]")
    _check_rank("attended", attended, 2, "[T, C]")
    axes = ("[C, D]", "[D]", "[D, 2, F]", "[F, D]", "[D]", "[D, Q]")
    for name, weight, axis in zip(weights._fields, weights, axes, strict=True):
        _check_rank(f"weights.{name}", weight, axis.count(",") + 1, axis)
        _check_dtype(f"weights.{name}", weight, hidden.dtype, "hidden's dtype; cast it first")
    rows, size = hidden.shape
    depth, inner, width = attended.shape[1], weights.down.shape[0], weights.next_qkv.shape[1]
    _check_dtype("attended", attended, hidden.dtype, "hidden's dtype; cast it first")
    _check_shape("attended", attended, (rows, depth), "one row for each of hidden's")
    shapes = ((depth, size), (size,), (size, 2, inner), (inner, size), (size,), (size, width))
    for name, weight, shape in zip(weights._fields, weights, shapes, strict=True):
        _check_shape(f"weights.{name}", weight, shape, "the widths that the other arrays have")
    _check_int32("num_rows", num_rows, 0, "[]")
    _check_int32("exchange", exchange, 1, "[W]")
    _check_eps("eps", eps)


def _check_eps(name, eps):
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{name} is {eps}; it must be finite and not negative, as 1e-6")


def _check_int32(name, array, rank, axes):
    _check_rank(name, array, rank, axes)
    _check_dtype(name, array, jnp.int32, "indices are int32; cast it first")


def _check_scalars(scale, soft_cap, sliding_window):
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be positive and finite, as 1 / sqrt(H)")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive and finite, or None")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
