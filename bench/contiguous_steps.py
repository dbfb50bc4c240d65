"""The programs of `bench.contiguous`: prefill and decode over a contiguous KV cache.

Each of B batch rows has a slab of `width` token slots in every layer's K and V [B, width, K, H].
The weights, projections, norms, MLPs and fused kernels come from jpaged's models.
Attention is cuDNN's where it supports the dtype and head size, else XLA's.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpaged.models.attention import rope_angles
from jpaged.models.config import ModelConfig
from jpaged.models.norm import add_norm, norm_update
from pallas_kernels import rms_norm, select_backend, sum_partials

MIN_ROWS = 8
"""Minimum number of rows of a GEMM. With fewer rows, XLA's GEMM would read at 1/5 of the speed."""

PUT: dict[str, Any] = {"mode": "drop", "unique_indices": True}
"""Options of scatters that write to the cache: a write with an index out of range is dropped."""


class Cache(NamedTuple):
    """The contiguous KV cache and the last tokens, which the programs update in place.

    Attributes:
        layers: K and V of each layer, [B, width, K, H].
        tokens: The last sampled token of each row, [B]. Its keys and values are not in the cache
            yet.
        lens: The number of tokens that the cache holds in each batch row, [B].
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    tokens: jax.Array
    lens: jax.Array


def prefill(bind: Callable, leaves: list, cache: Cache, prompts, lens, slots):
    """Prefill prompts [n, T] of `lens` [n] tokens into the batch rows `slots` [n].

    A padding prompt has a row index out of range.

    Returns:
        The cache, and the first output token of each prompt [n].
    """
    model, (n, length) = bind(leaves), prompts.shape
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), n)
    hidden, layers = forward(model, prompts.reshape(-1), positions, cache, slots)
    last = hidden.reshape(n, length, -1)[jnp.arange(n), lens - 1]
    tokens = choose(model, jnp.pad(last, ((0, max(MIN_ROWS - n, 0)), (0, 0))))[:n]
    own, filled = cache.tokens.at[slots].set(tokens, **PUT), cache.lens.at[slots].set(lens, **PUT)
    return Cache(layers, own, filled), tokens


def decode(bind: Callable, leaves: list, cache: Cache, stops, num_steps: int):
    """Decode `num_steps` tokens of every batch row.

    `stops` [B] is the maximum number of tokens that the cache holds for each batch row; 0 for an
    idle row. When a row has reached the maximum, later output tokens of the row are meaningless.

    Returns:
        The cache, and the tokens [num_steps, B].
    """
    model = bind(leaves)

    def step(cache: Cache, _):
        hidden, layers = forward(model, cache.tokens, cache.lens, cache, None)
        tokens = choose(model, hidden)
        return Cache(layers, tokens, jnp.minimum(cache.lens + 1, stops)), tokens

    return lax.scan(step, cache, length=num_steps)


def choose(model: Any, hidden: jax.Array) -> jax.Array:
    """Return the most probable next token of each row."""
    return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)


def forward(model: Any, tokens, positions, cache: Cache, slots):
    """Return the hidden states after the final norm, and K and V of every layer."""
    config, backend = model.config, select_backend(jax.default_backend())
    hidden, update, layers = model.embed_tokens(tokens, positions), None, []
    ropes = [layer.rope for layer in config.layers]
    tables = {r: rope_angles(positions, r, config.head_size) for r in dict.fromkeys(ropes) if r}
    for layer, kv, rope in zip(model.layers, cache.layers, ropes, strict=True):
        angles = None if rope is None else tables[rope]
        given = hidden, update, kv, slots, cache.lens, angles
        hidden, update, kv = run_layer(*nnx.split(layer), backend, *given)
        layers.append(kv)
    if model.final_norm is not None:
        hidden, _ = add_norm(model.final_norm, hidden, update, backend)
    elif update is not None:
        hidden += sum_partials(update, hidden.dtype)
    return hidden, tuple(layers)


# Because of this inner `jit`, JAX traces layers with equal shapes only once.
@partial(jax.jit, static_argnums=(0, 2))
def run_layer(definition, parameters, backend, hidden, update, kv, slots, lens, angles):
    """Run one layer.

    The residual stream is `hidden` [T, D] plus the sum of `update` [partials, T, D] over the first
    axis (split-K partials). An `update` of None means zeros.

    Returns:
        The new `hidden` and `update`, and K and V of the layer.
    """
    layer: Any = nnx.merge(definition, parameters)
    attend = partial(attention, layer.attention, slots=slots, lens=lens, angles=angles)
    # Models with post-norms normalize after each residual addition.
    if "sum" in layer.norm_positions:
        update, kv = attend(hidden, kv, backend)
        hidden = layer.attention_norm(hidden + sum_partials(update, hidden.dtype))
        update = sum_partials(layer.mlp(hidden, backend), hidden.dtype)
        return layer.mlp_norm(hidden + update), None, kv
    x, hidden = add_norm(layer.attention_norm, hidden, update, backend)
    update, kv = attend(x, kv, backend)
    update = norm_update(layer.attention_out_norm, update, hidden.dtype)
    x, hidden = add_norm(layer.mlp_norm, hidden, update, backend)
    return hidden, norm_update(layer.mlp_out_norm, layer.mlp(x, backend), hidden.dtype), kv


def attention(part: Any, x, kv, backend, *, slots, lens, angles):
    """Compute attention. Return the update of the residual stream as split-K partials, and K and V
    of the layer."""
    heads, norms = sum_partials(part.qkv(x, backend), x.dtype), part.head_norms()
    ends = heads.shape[1] - 2 * kv[0].shape[2], heads.shape[1] - kv[0].shape[2]
    q, k, v = jnp.split(heads, ends, axis=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, eps=norms.eps), rms_norm(k, norms.k, eps=norms.eps)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    options = {"scale": part.layer_config.scale, "implementation": implementation(q)}
    attend = attend_cache if slots is None else attend_prompts
    out, kv = attend(
        q, k, v, kv, lens if slots is None else slots, part.layer_config.sliding_window, options
    )
    return part.output(out.reshape(q.shape), backend), kv


def attend_prompts(q, k, v, kv, slots, window: int | None, options: dict):
    """Compute attention within each prompt, and store K and V in the rows `slots`.

    Padding comes after the tokens, so the causal mask hides the padding.
    """
    q, k, v = (x.reshape(slots.shape[0], -1, *x.shape[1:]) for x in (q, k, v))
    options["local_window_size"] = None if window is None else (window - 1, 0)
    places = slots, slice(q.shape[1])
    kv = kv[0].at[places].set(k, **PUT), kv[1].at[places].set(v, **PUT)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, **options), kv


def attend_cache(q, k, v, kv, lens, window: int | None, options: dict):
    """Store K and V of one new token per batch row, and compute the attention of the new tokens.

    A new token attends to itself and to all cached tokens of the row. If `window` is given, the
    token attends to the last `window` of these tokens.
    """
    places = jnp.arange(q.shape[0], dtype=jnp.int32), lens
    kv = kv[0].at[places].set(k, **PUT), kv[1].at[places].set(v, **PUT)
    if window is None:
        options["key_value_seq_lengths"] = lens + 1
    else:
        keys, last = jnp.arange(kv[0].shape[1], dtype=jnp.int32)[None], lens[:, None]
        options["mask"] = ((keys <= last) & (keys > last - window))[:, None, None]
    return jax.nn.dot_product_attention(q[:, None], *kv, **options), kv


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply rotary embedding to heads [T, heads, H] in float32; it pairs channels i and i + H/2."""
    cos, sin = (angle[:, None, :] for angle in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def implementation(q: jax.Array) -> str:
    """Return "cudnn" where cuDNN supports the dtype and head size, else "xla"."""
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


class Model:
    """A model and its compiled programs `prefill` and `decode`. Each program is compiled once per
    shape of its arguments."""

    def __init__(self, model: Any):
        capped = [layer.soft_cap for layer in model.config.layers if layer.soft_cap]
        if capped:
            raise ValueError(
                f"soft_cap={capped[0]} is unsupported by jax.nn.dot_product_attention: use a model"
                " without soft_cap"
            )
        definition, state = nnx.split(model)
        self.leaves, tree = jax.tree.flatten(state)
        self.config: ModelConfig = model.config
        self.dtype = model.dtype

        def bind(leaves: list) -> Any:
            return nnx.merge(definition, jax.tree.unflatten(tree, leaves))

        self._prefill = jax.jit(partial(prefill, bind), donate_argnums=1)
        self._decode = jax.jit(partial(decode, bind), donate_argnums=1, static_argnums=3)
        self.program: Callable = cache(self._compile)

    def empty(self, num_slots: int, width: int) -> Cache:
        """Return an empty cache with `num_slots` rows of `width` token slots."""
        shape = num_slots, width, self.config.num_kv_heads, self.config.head_size
        zeros, none = partial(jnp.zeros, shape, self.dtype), partial(jnp.zeros, num_slots)
        layers = tuple((zeros(), zeros()) for _ in range(self.config.num_layers))
        return Cache(layers, none(dtype=jnp.int32), none(dtype=jnp.int32))

    def _compile(self, num_slots: int, width: int, *shape: int) -> Callable:
        """Compile `prefill` for a shape (n, T), or `decode` for (num_steps,)."""
        # XLA times GEMMs while it compiles, so wait until no other program runs.
        jax.block_until_ready(jax.live_arrays())
        held = jax.eval_shape(partial(self.empty, num_slots, width))
        if len(shape) == 1:
            return self._decode.lower(self.leaves, held, held.lens, *shape).compile()
        prompts, row = (jax.ShapeDtypeStruct(axes, jnp.int32) for axes in (shape, shape[:1]))
        return self._prefill.lower(self.leaves, held, prompts, row, row).compile()
