"""Slow NumPy implementations of the ops in `pallas_kernels`, for tests of the kernels.

The functions loop over sequences, rows and heads. The parameter `dtype` is the dtype of the
arithmetic. Tests compare a kernel with the float64 results. Many tests also compute results in the
kernel's dtype: the error of these results determines the error that the kernel may have.
"""

import ml_dtypes
import numpy as np

from pallas_kernels.scores.adjustments import (
    BELOW_MIN_TOKENS,
    COUNT_MASK,
    HAS_BIASES,
    IN_PROMPT,
    IS_ADJUSTED,
    IS_ENDING,
)


def paged_decode_attention(
    q, kv, block_tables, seq_lens, *, scales=(1, 1), dtype=np.float64, **options
):
    """Return the attention outputs [B, N, H] of the last token of each sequence.

    The outputs are zeros for sequences of length 0, which are padding.
    """
    out = np.zeros(q.shape, dtype)
    for b, seq_len in enumerate(np.asarray(seq_lens)):
        if seq_len:
            keys, values = _gather(kv, block_tables[b], seq_len, scales, dtype)
            out[b] = _attend(np.asarray(q[b]), keys, values, seq_len - 1, **options)
    return out


def paged_prefill_attention(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    scales=(1.0, 1.0),
    dtype=np.float64,
    **options,
):
    """Return the outputs [T, N, H] of causal attention.

    Rows `query_start_loc[b]` to `query_start_loc[b + 1] - 1` belong to the last tokens of sequence
    b. The rows after the last sequence are padding, and their outputs are zeros.
    """
    out = np.zeros(q.shape, dtype)
    starts = np.asarray(query_start_loc)
    for b, seq_len in enumerate(np.asarray(seq_lens)):
        keys, values = _gather(kv, block_tables[b], seq_len, scales, dtype)
        for t in range(starts[b], starts[b + 1]):
            position = seq_len - (starts[b + 1] - t)
            out[t] = _attend(np.asarray(q[t]), keys, values, position, **options)
    return out


def write_kv(kv, k, v, slot_mapping):
    """Return a copy of the KV pool, with the key and value of token t in slot `slot_mapping[t]`.

    Tokens with a slot outside the pool are dropped.
    """
    pool_k, pool_v = np.array(kv[0]), np.array(kv[1])
    num_blocks, block_size = pool_k.shape[:2]
    for t, slot in enumerate(np.asarray(slot_mapping)):
        if 0 <= slot < num_blocks * block_size:
            pool_k[slot // block_size, slot % block_size] = np.asarray(k)[t]
            pool_v[slot // block_size, slot % block_size] = np.asarray(v)[t]
    return pool_k, pool_v


def paired(numbers):
    """Pack pairs of float8_e4m3fn numbers [..., H] into uint16 [..., H / 2].

    Element i has column 2 * i in the low byte, and column 2 * i + 1 in the high byte.
    """
    return np.ascontiguousarray(numbers).view("<u2")


def unpaired(pool):
    """Unpack a uint16 pool into FP8 numbers, two per element. Return any other pool unchanged."""
    pool = np.asarray(pool)
    return pool.view(ml_dtypes.float8_e4m3fn) if pool.dtype == np.uint16 else pool


def float8(x, scale):
    """Return x / scale, clipped to [-448, 448] and rounded to the nearest float8_e4m3fn number."""
    quotient = np.asarray(x).astype(np.float32) / np.float32(scale)
    return np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def rope_write_kv(qkv, kv, slot_mapping, angles, norms=None, *, dtype=np.float64):
    """Sum `qkv` over axis 0, normalize and rotate queries and keys, and store keys and values.

    Return the queries [T, N, H] and a copy of the KV pool with the new keys and values. All
    returned arrays have the dtype `dtype`.
    """
    num_kv_heads = kv[0].shape[2]
    rotated = np.asarray(qkv).astype(dtype).sum(axis=0)
    num_heads = rotated.shape[1] - 2 * num_kv_heads
    for t in range(rotated.shape[0]):
        for h in range(num_heads + num_kv_heads):
            row = rotated[t, h]
            if norms is not None:
                row = _rms_norm(row, norms.q if h < num_heads else norms.k, norms.eps)
            if angles is not None:
                row = _rotate(row, np.asarray(angles[0])[t], np.asarray(angles[1])[t])
            rotated[t, h] = row
    pool = tuple(np.array(part, dtype) for part in kv)
    k, v = rotated[:, num_heads:-num_kv_heads], rotated[:, -num_kv_heads:]
    return rotated[:, :num_heads], write_kv(pool, k, v, slot_mapping)


def rope_decode_attention(
    qkv, kv, block_tables, seq_lens, angles, norms=None, *, dtype=np.float64, **options
):
    """Run `rope_write_kv`, then `paged_decode_attention`, for one new token per sequence.

    Return the attention outputs [B, N, H], and a copy of the KV pool with the new keys and values.
    """
    lens, block_size = np.asarray(seq_lens), kv[0].shape[1]
    last = np.maximum(lens - 1, 0)
    blocks = np.asarray(block_tables)[np.arange(len(lens)), last // block_size]
    slots = np.where(lens > 0, blocks * block_size + last % block_size, -1)
    q, pool = rope_write_kv(qkv, kv, slots, angles, norms, dtype=dtype)
    return paged_decode_attention(q, pool, block_tables, lens, dtype=dtype, **options), pool


def add_rms_norm(hidden, update, weight, *, eps, dtype=np.float64):
    """Return the RMS-normalized rows [T, D], and the rows before normalization.

    The rows before normalization are `hidden` plus the sum of `update` [P, T, D] over axis 0.
    """
    total = np.asarray(hidden).astype(dtype) + np.asarray(update).astype(dtype).sum(axis=0)
    normed = np.zeros_like(total)
    for t, row in enumerate(total):
        normed[t] = _rms_norm(row, weight, eps)
    return normed, total


def gated_silu(gate_up, *, dtype=np.float64):
    """Return silu(gate) * up [T, F]. `gate_up` [T, 2, F] contains gate and up."""
    gate, up = np.moveaxis(np.asarray(gate_up).astype(dtype), 1, 0)
    with np.errstate(over="ignore"):  # exp(-gate) may be inf; the quotient is then 0
        return gate / (1 + np.exp(-gate)) * up


def gated_gemm(x, weight, *, dtype=np.float64):
    """Return silu(x @ gate) * (x @ up) [T, F]. `weight` [D, 2, F] contains gate and up."""
    x, weight = (np.asarray(array).astype(dtype) for array in (x, weight))
    return gated_silu(np.einsum("td,dcf->tcf", x, weight), dtype=dtype)


def to_fp8(x, scale):
    """Return x / scale, rounded to the nearest finite float8_e4m3fn number, as float64.

    If two numbers are equally near, return the number whose last bit is 0.
    """
    bits = np.arange(256, dtype=np.uint8)
    numbers = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    usable = np.isfinite(numbers)
    numbers, bits = numbers[usable], bits[usable]
    # Divide in float32, as the ops do. A float64 quotient may round to another FP8 number.
    scaled = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    distance = np.abs(scaled.astype(np.float64)[..., None] - numbers)
    tied = distance == distance.min(-1, keepdims=True)
    return numbers[np.where(tied, bits % 2, 2).argmin(-1)]


def scaled_gemm(x, weight, x_scale, weight_scale):
    """Return (x * x_scale) @ (weight * weight_scale).T, computed in float64."""
    x, weight = (np.asarray(array, np.float64) for array in (x, weight))
    return (x * x_scale) @ (weight * weight_scale).T


def fused_layer(attention_output, hidden, weights, *, eps, dtype=np.float64):
    """Compute everything between the attention of one layer and the attention of the next layer.

    Return the residual stream [T, D], and the next layer's queries, keys and values [T, Q].
    """
    attention_output, hidden = (np.asarray(x).astype(dtype) for x in (attention_output, hidden))
    output, norm, gate_up, down, next_norm, qkv = (np.asarray(w).astype(dtype) for w in weights)
    streams, projected = [], []
    for row, stream in zip(attention_output, hidden, strict=True):
        stream = stream + row @ output
        normed = _rms_norm(stream, norm, eps)
        gate, up = normed @ gate_up[:, 0], normed @ gate_up[:, 1]
        stream = stream + (gate / (1 + np.exp(-gate)) * up).astype(dtype) @ down
        streams.append(stream)
        projected.append(_rms_norm(stream, next_norm, eps) @ qkv)
    return np.stack(streams), np.stack(projected)


def _rms_norm(row, weight, eps):
    mean = (row * row).sum() / row.dtype.type(row.size)
    return row / np.sqrt(mean + row.dtype.type(eps)) * np.asarray(weight).astype(row.dtype)


def _rotate(row, cos, sin):
    """Apply a rotary embedding to one head: rotate each pair of channels i and i + H / 2."""
    first, second = np.split(row, 2)
    cos, sin = cos.astype(row.dtype), sin.astype(row.dtype)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def truncation_mask(logits, *, temperature, min_p, top_k, top_p, dtype=np.float64):
    """Return a boolean mask [B, V] of the tokens that min-p, top-k and top-p sampling keep."""
    rows = zip(np.asarray(logits).astype(dtype), temperature, min_p, top_p, top_k, strict=True)
    return np.stack([_kept(row, float(t), float(m), float(p), int(k)) for row, t, m, p, k in rows])


def _kept(row, temperature, min_p, top_p, top_k):
    relative = (row - row.max()) / temperature
    weight = np.exp(relative)
    kept = relative >= (np.log(min_p) if min_p else -np.inf)
    if 0 < top_k < len(row):
        kept &= row >= np.sort(row)[::-1][top_k - 1]
    if top_p < 1:
        order = np.argsort(-row[kept], kind="stable")
        mass = np.cumsum(weight[kept][order])
        last = min(np.searchsorted(mass, top_p * mass[-1]), len(order) - 1)
        kept &= row >= row[kept][order[last]]
    return kept


def adjust_logits(logits, token_state, biases, state_rows, row_flags, penalties, dtype=np.float64):
    """Apply biases, forbidden tokens and penalties to the logits [B, V].

    The parameters `token_state` to `penalties` are the fields of `Adjustments`.
    """
    found = np.array(logits, dtype)
    for b, (row, flags) in enumerate(zip(state_rows, row_flags, strict=True)):
        repetition, presence, frequency = np.asarray(penalties, dtype)[b]
        for v, state in enumerate(np.asarray(token_state)[row] if flags & IS_ADJUSTED else ()):
            x, count = found[b, v], state & COUNT_MASK
            x += biases[row][v] if flags & HAS_BIASES else 0
            x = -np.inf if flags & BELOW_MIN_TOKENS and state & IS_ENDING else x
            if state & (IN_PROMPT | COUNT_MASK):
                x = x / repetition if x > 0 else x * repetition
            found[b, v] = x - presence * (count > 0) - frequency * count
    return found


def token_scores(logits, token_ids, count, *, reports_logits=None, dtype=np.float64):
    """Return one tuple per row of logits.

    The tuple contains the log-probability and the rank of the row's token in `token_ids`, and the
    ids and log-probabilities of the `count` most probable tokens. If a row's flag in
    `reports_logits` is set, logits replace the row's log-probabilities.
    """
    found = []
    are_logits = [False] * len(logits) if reports_logits is None else reports_logits
    rows = np.asarray(logits).astype(dtype)
    for row, token, is_logit in zip(rows, token_ids, are_logits, strict=True):
        total = 0.0 if is_logit else np.log(np.exp(row - row.max()).sum()) + row.max()
        logprobs = row - total
        order = np.argsort(-row, kind="stable")[:count]
        found.append((logprobs[token], int((row >= row[token]).sum()), order, logprobs[order]))
    return found


def target_scores(x, table, targets, soft_cap=None):
    """Return three numbers per row, as three arrays.

    The numbers are the row's largest logit, the sum of exp(logit - largest logit), and the logit of
    the target token. A target outside the vocabulary gets the logit 0.
    """
    logits = x @ table.T
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    largest = logits.max(axis=1)
    known = [row[t] if 0 <= t < len(row) else 0.0 for row, t in zip(logits, targets, strict=True)]
    return largest, np.exp(logits - largest[:, None]).sum(axis=1), np.array(known)


def copy_blocks(pool, src, dst):
    """Return a copy of the KV pool in which block dst[i] has the old contents of block src[i].

    The function copies the keys and values of every layer.
    """
    layers = [(np.array(k), np.array(v)) for k, v in pool]
    for before, after in zip(pool, layers, strict=True):
        for s, d in zip(np.asarray(src), np.asarray(dst), strict=True):
            after[0][d] = np.asarray(before[0])[s]
            after[1][d] = np.asarray(before[1])[s]
    return layers


def _gather(kv, block_table, seq_len, scales, dtype):
    """Return the keys and values [seq_len, K, H] of one sequence, multiplied by `scales`."""
    block_size = kv[0].shape[1]
    positions = np.arange(seq_len)
    blocks = np.asarray(block_table)[positions // block_size]
    keys, values = (unpaired(np.asarray(pool)[blocks, positions % block_size]) for pool in kv)
    k_scale, v_scale = (np.asarray(scale).astype(dtype) for scale in scales)
    return keys.astype(dtype) * k_scale, values.astype(dtype) * v_scale


def _attend(q, keys, values, position, *, scale, soft_cap=None, sliding_window=None):
    """Return the attention output [N, H] of the token at `position`.

    The token sees all keys up to `position`. If `sliding_window` is set, the token sees only the
    last `sliding_window` keys up to `position`.
    """
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    keys, values = keys[first : position + 1], values[first : position + 1]
    q = q.astype(keys.dtype)
    group = q.shape[0] // keys.shape[1]
    out = np.zeros_like(q)
    for n in range(q.shape[0]):
        scores = (keys[:, n // group] @ q[n]) * keys.dtype.type(scale)
        if soft_cap is not None:
            cap = keys.dtype.type(soft_cap)
            scores = np.tanh(scores / cap) * cap
        weights = np.exp(scores - scores.max())
        out[n] = (weights / weights.sum()) @ values[:, n // group]
    return out


def device_sum(rows):
    """Return the sum [T, D] of the arrays of n devices, `rows` [n, T, D].

    Add in float32, and round the final sum to the dtype of `rows`.
    """
    total = np.zeros(rows.shape[1:], np.float32)
    for part in rows:
        total = total + part.astype(np.float32)
    return total.astype(rows.dtype)


def route(
    logits,
    num_choices,
    *,
    softmax_first=True,
    normalize=False,
    scale=None,
    num_tokens=None,
    first_expert=0,
    num_local_experts=None,
):
    """Choose `num_choices` experts per token, and return the fields of `pallas_kernels.Routing`."""
    logits = np.asarray(logits, np.float64)
    (num_rows, num_experts), num_pairs = logits.shape, len(logits) * num_choices
    num_local = num_experts if num_local_experts is None else num_local_experts
    weights = np.zeros((num_rows, num_choices))
    chosen_experts = np.full((num_rows, num_choices), num_local)
    for t, row in enumerate(logits):
        chosen = sorted(range(num_experts), key=lambda e: (-row[e], e))[:num_choices]
        among = range(num_experts) if softmax_first else chosen
        total = sum(np.exp(row[e]) for e in among)
        row_weights = np.array([np.exp(row[e]) / total for e in chosen])
        if normalize:
            row_weights /= row_weights.sum()
        weights[t] = row_weights * (1 if scale is None else scale)
        for c, expert in enumerate(chosen):
            local = expert - first_expert
            if 0 <= local < num_local and (num_tokens is None or t < num_tokens):
                chosen_experts[t, c] = local
    order = sorted(range(num_pairs), key=lambda pair: (chosen_experts.flat[pair], pair))
    positions = np.zeros((num_rows, num_choices), int)
    for place, pair in enumerate(order):
        positions.flat[pair] = place
    offsets = [int((chosen_experts < e).sum()) for e in range(num_local + 1)]
    return weights, chosen_experts, np.array(order), positions, np.array(offsets)


def experts(x, gate_up, down, weights, chosen):
    """Return for each token the weighted sum [T, D] of the outputs of k experts.

    `chosen` [T, k] contains the expert ids of each token, from 0 to E - 1. An id of E stands for no
    expert, and adds nothing.
    """
    x, gate_up, down = (np.asarray(each, np.float64) for each in (x, gate_up, down))
    out = np.zeros(x.shape)
    for t, row in enumerate(x):
        for weight, expert in zip(weights[t], chosen[t], strict=True):
            if expert < len(gate_up):
                gate, up = np.split(row @ gate_up[expert], 2)
                out[t] += weight * (gate / (1 + np.exp(-gate)) * up @ down[expert])
    return out


def scaled_expert_gated_gemm(x, weight, x_scale, weight_scale, chosen):
    """Return silu(gate) * up [T, k, F] for the k experts of each token.

    `chosen` [T, k] contains the expert ids of each token, from 0 to E - 1. An id of E stands for no
    expert, and gives zeros. `x` and `weight` are in FP8. `x_scale` has the shape of `x`, and
    `weight_scale` has the shape of `weight`.
    """
    out = np.zeros((*np.shape(chosen), weight.shape[1] // 2))
    for t, c in np.ndindex(*np.shape(chosen)):
        if (expert := chosen[t, c]) < len(weight):
            factors = x[t : t + 1], weight[expert], x_scale[t : t + 1], weight_scale[expert]
            out[t, c] = gated_silu(scaled_gemm(*factors).reshape(1, 2, -1))[0]
    return out


def scaled_expert_down_gemm(x, weight, x_scale, weight_scale, weights, chosen):
    """Return for each token the weighted sum [T, D] of the down projections of k experts.

    `x` [T, k, F] contains a row for each token and expert. `chosen` [T, k] contains the expert ids
    of each token, from 0 to E - 1. An id of E stands for no expert, and adds nothing. `x` and
    `weight` are in FP8. `x_scale` has the shape of `x`, and `weight_scale` has the shape of
    `weight`.
    """
    out = np.zeros((len(x), weight.shape[1]))
    for t, c in np.ndindex(*np.shape(chosen)):
        if (expert := chosen[t, c]) < len(weight):
            pair = np.s_[t, c : c + 1]
            factors = x[pair], weight[expert], x_scale[pair], weight_scale[expert]
            out[t] += weights[t, c] * scaled_gemm(*factors)[0]
    return out
