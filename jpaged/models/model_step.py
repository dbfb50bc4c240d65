"""Operations for a user's model that depend on the step: attention over the pool, and experts.

`ModelStep` is the argument `step` of `JaxModel.forward`. It also has the operations of `ModelOps`.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array

from jpaged.errors import format_count
from jpaged.models.attention import (
    AttentionInputs,
    attend_paged,
    attend_projected,
    invariant_inputs,
    split_heads,
)
from jpaged.models.experts import router_logits
from jpaged.models.layer_calls import trace_once
from jpaged.models.model_devices import REPLICATED, ShardRunner, Split, refuse_split
from jpaged.models.model_ops import (
    ModelOps,
    Partials,
    as_partials,
    check_norm,
    static_number,
    sum_over_devices,
)
from jpaged.models.norm import normalize_rows
from pallas_kernels import (
    HeadNorms,
    LayerKV,
    expert_down_gemm,
    expert_gated_gemm,
    route,
    write_kv,
)
from pallas_kernels.kv_cache.xla import rotate

KV_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes of queries, keys, values, hidden states and logits."""
_UNROLL = (
    "call it directly in forward, with a Python int for each layer: unroll a scan over layers "
    "into a Python loop, and do not put it inside jax.jit, jax.checkpoint, jax.vmap or lax.cond"
)


class LayerHeads(NamedTuple):
    """Number and width of the KV heads in one layer.

    Attributes:
        num_kv_heads: Number of KV heads (K).
        head_size: Width of one head (H).
    """

    num_kv_heads: int
    head_size: int


@trace_once
def _experts(
    x,
    router,
    gate_up,
    down,
    num_tokens,
    *,
    num_experts_per_token,
    normalize,
    backend,
    batch_invariant,
    sum_axis=None,
):
    mode = {"backend": backend, "batch_invariant": batch_invariant}
    logits = router_logits(x, router, **mode)
    routing = route(
        logits, num_experts_per_token, normalize=normalize, num_tokens=num_tokens, **mode
    )
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    rows = expert_down_gemm(expert_gated_gemm(x, flat, routing, **mode), down, routing, **mode)
    if sum_axis is None:
        return rows
    return sum_over_devices(rows, sum_axis, batch_invariant=batch_invariant)


@trace_once
def _attend(q, k, v, kv, attention, *, heads, batch_invariant, scale, soft_cap, sliding_window):
    """Store keys and values of one layer, and compute attention.

    In the pool, all layers have equally many heads of equal width. If the model's layer has fewer
    or narrower heads, they are padded with zeros, which do not change the scores.

    Returns:
        The outputs [T, N, H], and the layer's updated pool.
    """
    num_heads, head_size = q.shape[1:]
    new_heads, new_columns = kv.k.shape[2] - heads.num_kv_heads, kv.head_size - head_size
    if new_heads or new_columns:
        group = num_heads // heads.num_kv_heads
        widths = [(0, 0), (0, new_heads), (0, new_columns)]
        k, v = jnp.pad(k, widths), jnp.pad(v, widths)
        q = jnp.pad(q, [(0, 0), (0, group * new_heads), (0, new_columns)])
    dtype = k.dtype if kv.is_scaled else kv.k.dtype
    slots, backend = attention.slot_mapping, attention.backend
    kv = write_kv(kv, k.astype(dtype), v.astype(dtype), slots, backend=backend)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    if batch_invariant:
        attention, options = invariant_inputs(attention), {**options, "batch_invariant": True}
    out = attend_paged(q, kv, attention, backend=backend, **options)
    return out[:, :num_heads, :head_size], kv


@trace_once
def _rope_attend(
    qkv,
    angles,
    norms,
    kv,
    attention,
    *,
    heads,
    batch_invariant,
    scale,
    soft_cap,
    sliding_window,
):
    """Normalize and rotate queries and keys of one layer, and do the work of `_attend`."""
    mode = {"batch_invariant": batch_invariant}
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window, **mode}
    if (kv.k.shape[2], kv.head_size) == heads:
        return attend_projected(
            qkv.values, kv, attention, angles, norms, None, dtype=qkv.dtype, **options
        )
    # The pool's heads are larger than this layer's heads, so the queries and keys are padded.
    # The fused kernels cannot rotate padded heads.
    q, k, v = split_heads(qkv.values, heads.num_kv_heads, qkv.dtype)
    if norms is not None:
        q, k = (
            normalize_rows(it, weight, norms.eps, **mode)
            for it, weight in ((q, norms.q), (k, norms.k))
        )
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    return _attend(q, k, v, kv, attention, heads=heads, **options)


def _rope_attend_heads(q, k, v, angles, norms, kv, attention, **options):
    """Run `_rope_attend` on the query, key and value heads of one device."""
    qkv = Partials(jnp.concatenate([q, k, v], axis=1)[None], q.dtype)
    return _rope_attend(qkv, angles, norms, kv, attention, **options)


class ModelStep(ModelOps):
    """Argument of `forward` that stands for one step of the engine.

    `forward` calls `attend` or `rope_attend` once for each layer, in any order. An object is valid
    during one call of `forward`.
    """

    def __init__(
        self,
        layers: Sequence[LayerHeads],
        pool: Sequence[LayerKV],
        attention: AttentionInputs,
        *,
        batch_invariant: bool = False,
        shard_runner: ShardRunner | None = None,
    ):
        super().__init__(
            attention.backend, batch_invariant=batch_invariant, shard_runner=shard_runner
        )
        self._layers, self._pool, self._attention = layers, pool, attention
        self._num_tokens = attention.slot_mapping.shape[0]
        self._attended: dict[int, LayerKV] = {}
        self._trace = get_opaque_trace_state()

    # The arguments of `attend` have no jaxtyping shapes. `attend` checks the shapes itself, so that
    # an error names the layer.
    def attend(
        self,
        layer: SupportsIndex,
        q: Array,
        k: Array,
        v: Array,
        *,
        window: SupportsIndex | None = None,
        scale: SupportsFloat | None = None,
        soft_cap: SupportsFloat | None = None,
    ) -> Array:
        """Write the tokens' keys and values to the pool, and return causal attention.

        Each token attends to all tokens of its sequence up to itself, also to those that earlier
        steps have computed. Queries and keys must be rotated already, if the model rotates them.

        Args:
            layer: Index of the layer, a Python int from 0 to `num_layers` - 1.
            q: Queries [T, N, H]. N is a multiple of the layer's number of KV heads, K.
            k, v: Keys and values [T, K, H].
            window: Number of keys that a query sees, including the key of its own position. None:
                all keys.
            scale: Factor of the dot products; None for 1 / sqrt(H).
            soft_cap: Cap that turns scores into `soft_cap * tanh(scores / soft_cap)`; None for no
                cap.

        Returns:
            The outputs [T, N, H] of the query heads, in q's dtype.

        Raises:
            TypeError, ValueError: An argument is invalid, or the layer was attended already.
        """
        index = self._check_layer("attend", layer)
        self._check_heads(index, q, k, v)
        options = self._attention_options("attend", index, window, scale, soft_cap)
        out, self._attended[index] = self._attend(index, q, k, v, options)
        return out

    def rope_attend(
        self,
        layer: SupportsIndex,
        qkv: Array | Partials,
        angles: tuple[Array, Array] | None,
        *,
        norms: tuple[Array, Array, float] | None = None,
        window: SupportsIndex | None = None,
        scale: SupportsFloat | None = None,
        soft_cap: SupportsFloat | None = None,
    ) -> Array:
        """Normalize and rotate queries and keys, then do the work of `attend`, in fused kernels.

        Args:
            layer, window, scale, soft_cap: See `attend`.
            qkv: Query heads, key heads and value heads of each token, [T, N + 2 K, H], for example
                the result of `project`.
            angles: Cosines and sines [T, H / 2], in float32, of the tokens' rotation (Su et al.
                2021, arXiv:2104.09864). Channels i and i + H / 2 form a pair. None: do not rotate.
            norms: Weights [H] and epsilon of an RMSNorm of each query head and of each key head,
                before the rotation; None for no norms.

        Returns:
            The outputs [T, N, H] of the query heads, in the dtype of `qkv`.

        Raises:
            TypeError, ValueError: An argument is invalid, or the layer was attended already.
        """
        index, product = self._check_layer("rope_attend", layer), as_partials(qkv)
        self._check_projection(index, product.values, angles)
        options = self._attention_options("rope_attend", index, window, scale, soft_cap)
        head_norms = None if norms is None else self._check_head_norms(index, norms)
        out, self._attended[index] = self._rope_attend(index, product, angles, head_norms, options)
        return out

    def experts(
        self,
        x: Array,
        router: Array,
        gate_up: Array,
        down: Array,
        *,
        num_experts_per_token: SupportsIndex,
        normalize: bool = False,
    ) -> Array:
        """Return for each token the weighted sum of the experts that the router chooses.

        No token is dropped.

        Each expert is a SwiGLU. The routing weights are the softmax over all experts.

        Args:
            x: Rows [T, D].
            router: Weight of the router [E, D].
            gate_up: Gate and up projection of each expert [E, D, 2, F].
            down: Down projection of each expert [E, F, D]. If the weights are split over devices,
                `gate_up` and `down` must both be split along F, and the devices' rows are summed.
            num_experts_per_token: Number of experts that the router chooses for each token.
            normalize: Whether the weights of a token's experts are divided by their sum.

        Returns:
            The rows [T, D], in x's dtype.
        """
        _check_experts(x, router, gate_up, down)
        count = operator.index(num_experts_per_token)
        arrays = x, router, gate_up, down, self._attention.num_tokens
        options = {"num_experts_per_token": count, "normalize": bool(normalize)}
        split = self._experts_split(gate_up, down)
        return self._call("experts", _experts, *arrays, split=split, **options)

    def _experts_split(self, gate_up: Array, down: Array) -> Split | None:
        """Return how devices split the arrays of the operation `experts`; None on one device."""
        if (shard_runner := self._shard_runner) is None:
            return None
        axes = []
        for name, weight, inner in (
            ("gate_up [E, D, 2, F]", gate_up, 3),
            ("down [E, F, D]", down, 1),
        ):
            axis = shard_runner.weight_axis("experts", name, weight)
            if axis not in (None, inner):
                raise refuse_split("experts", name, axis, "split along F")
            axes.append(axis)
        if (axes[0] is None) != (axes[1] is None):
            raise ValueError(
                "experts: only one of gate_up and down is split over the devices: split both along "
                "F, or none"
            )
        weights = [shard_runner.split_along(axis) for axis in axes]
        sum_axis = None if axes[0] is None else shard_runner.axis_name
        return Split((REPLICATED, REPLICATED, *weights, REPLICATED), sum_axis=sum_axis)

    def take_pool(self) -> tuple[LayerKV, ...]:
        """Return the pool with the keys and values that `forward` has written.

        Raises:
            ValueError: `forward` has not called `attend` for every layer.
        """
        missing = [str(i) for i in range(len(self._layers)) if i not in self._attended]
        if missing:
            raise ValueError(
                f"forward called attend for {len(self._attended)} of "
                f"{format_count(len(self._layers), 'layer')}: also call attend for "
                f"layer {', '.join(missing)}, or lower num_layers"
            )
        return tuple(self._attended[i] for i in range(len(self._layers)))

    def _check_layer(self, name: str, layer: SupportsIndex) -> int:
        """Check the argument `layer` of an attention call, and return it as an int."""
        if isinstance(layer, Tracer):
            raise TypeError(f"{name}: layer is a traced value, but must be a Python int: {_UNROLL}")
        index = operator.index(layer)
        if not 0 <= index < len(self._layers):
            raise ValueError(
                f"{name}: layer={index}, but the model has num_layers={len(self._layers)}: pass an "
                f"int from 0 to {len(self._layers) - 1}"
            )
        if index in self._attended:
            raise ValueError(
                f"{name} was called twice for layer {index}: call it once per layer, and give "
                "each layer its own index, even if layers share weights"
            )
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                f"{name} for layer {index} runs inside a JAX transformation: {_UNROLL}"
            )
        return index

    def _attention_options(
        self, name: str, index: int, window: Any, scale: Any, soft_cap: Any
    ) -> dict[str, Any]:
        """Check `window`, `scale` and `soft_cap`, and return them as keywords of the attention
        ops."""
        where = f"{name} for layer {index}"
        default_scale = 1 / math.sqrt(self._layers[index].head_size)
        return {
            "scale": static_number(where, "scale", scale, float) or default_scale,
            "soft_cap": static_number(where, "soft_cap", soft_cap, float),
            "sliding_window": static_number(where, "window", window, operator.index),
        }

    def _check_heads(self, index: int, q: Array, k: Array, v: Array) -> None:
        num_kv_heads, head_size = self._layers[index]
        wanted, where = (self._num_tokens, num_kv_heads, head_size), f"attend for layer {index}"
        for name, array in (("q", q), ("k", k), ("v", v)):
            _check_dtype(where, name, array)
        for name, array in (("k", k), ("v", v)):
            if array.shape != wanted:
                raise ValueError(
                    f"{where}: {name} has shape {list(array.shape)}, but must be "
                    f"[T, K, H] = {list(wanted)}: reshape it, or correct num_kv_heads or head_size"
                )
        is_grouped = q.ndim == 3 and q.shape[1] > 0 and q.shape[1] % num_kv_heads == 0
        if not is_grouped or (q.shape[0], q.shape[2]) != (wanted[0], wanted[2]):
            raise ValueError(
                f"{where}: q has shape {list(q.shape)}, but must be [T, N, H] = "
                f"[{wanted[0]}, N, {head_size}] with N a multiple of {num_kv_heads}: reshape it, "
                "or correct num_kv_heads or head_size"
            )

    def _check_projection(self, index: int, values: Array, angles: Any) -> None:
        num_kv_heads, head_size = self._layers[index]
        shape, where = values.shape[1:], f"rope_attend for layer {index}"
        _check_dtype(where, "qkv", values)
        num_heads = shape[1] - 2 * num_kv_heads if len(shape) == 3 else 0
        is_grouped = num_heads > 0 and num_heads % num_kv_heads == 0
        if not is_grouped or (shape[0], shape[2]) != (self._num_tokens, head_size):
            raise ValueError(
                f"{where}: qkv has shape {list(shape)}, but must be [T, N + 2 K, H] = "
                f"[{self._num_tokens}, N + {2 * num_kv_heads}, {head_size}] with N a multiple of "
                f"{num_kv_heads}: reshape it, or correct num_kv_heads or head_size"
            )
        if angles is None:
            return
        half = (self._num_tokens, head_size // 2)
        found = [f"{it.dtype}{list(it.shape)}" for it in angles]
        if head_size % 2 or found != [f"float32{list(half)}"] * 2:
            raise ValueError(
                f"{where}: angles has {' and '.join(found)}, but must be two arrays "
                f"float32[T, H / 2] = {list(half)} of an even head size H={head_size}"
            )

    def _check_head_norms(self, index: int, norms: Any) -> HeadNorms:
        """Return the norms as a `HeadNorms`, whose weights fit the heads of a layer."""
        where, head_size = f"rope_attend for layer {index}", self._layers[index].head_size
        if len(norms) != 3:
            raise ValueError(
                f"{where}: norms has {format_count(len(norms), 'entry', 'entries')}: pass the "
                "weights of the query norm, the weights of the key norm, and epsilon"
            )
        q, k, eps = norms
        check_norm(where, q, (head_size,), eps)
        return HeadNorms(q, k, check_norm(where, k, (head_size,), eps))

    def _attend(
        self, index: int, q: Array, k: Array, v: Array, options: dict[str, Any]
    ) -> tuple[Array, LayerKV]:
        """Do the work of `attend`. The arguments have been checked."""
        layer = self._pool[index], self._attention
        mode = {"heads": self._layers[index], "batch_invariant": self._batch_invariant}
        if (shard_runner := self._shard_runner) is None:
            return _attend(q, k, v, *layer, **mode, **options)
        split = _attention_split(shard_runner, 0)
        mode["heads"] = _shard_heads(shard_runner, mode["heads"])
        return shard_runner.run(partial(_attend, **mode, **options), split, q, k, v, *layer)

    def _rope_attend(
        self,
        index: int,
        qkv: Partials,
        angles: tuple[Array, Array] | None,
        norms: HeadNorms | None,
        options: dict[str, Any],
    ) -> tuple[Array, LayerKV]:
        """Do the work of `rope_attend`. The arguments have been checked."""
        layer = self._pool[index], self._attention
        mode = {"heads": self._layers[index], "batch_invariant": self._batch_invariant}
        if (shard_runner := self._shard_runner) is None:
            return _rope_attend(qkv, angles, norms, *layer, **mode, **options)
        # Each device computes attention for some of the heads, so split Q, K and V by heads. `qkv`
        # has partial products whose sum is Q, K and V. `split_heads` adds them first, so that the
        # devices exchange less.
        qkv_heads = split_heads(qkv.values, mode["heads"].num_kv_heads, qkv.dtype)
        split = _attention_split(shard_runner, 2)
        mode["heads"] = _shard_heads(shard_runner, mode["heads"])
        function = partial(_rope_attend_heads, **mode, **options)
        return shard_runner.run(function, split, *qkv_heads, angles, norms, *layer)


def _attention_split(shard_runner: ShardRunner, num_complete: int) -> Split:
    """Return how devices split the arguments and results of attention.

    Queries, keys, values, outputs and the layer's pool are split by heads. Each device receives all
    other arguments whole.

    Args:
        shard_runner: Runner for the devices.
        num_complete: Number of arguments that come after V and before the pool, such as the
            rotation angles. Each device receives these arguments whole.
    """
    of_heads, of_pool = shard_runner.split_along(1), shard_runner.split_along(2)
    complete = (REPLICATED,) * num_complete
    inputs = of_heads, of_heads, of_heads, *complete, of_pool, REPLICATED
    return Split(inputs, (of_heads, of_pool))


def _shard_heads(shard_runner: ShardRunner, heads: LayerHeads) -> LayerHeads:
    """Return the number and width of the KV heads that one device has."""
    return heads._replace(num_kv_heads=heads.num_kv_heads // shard_runner.num_devices)


def _check_dtype(where: str, name: str, array: Any) -> None:
    if not isinstance(array, jax.Array) or array.dtype.name not in KV_DTYPES:
        found = array.dtype if isinstance(array, jax.Array) else type(array).__name__
        raise TypeError(f"{where}: {name} is {found}: pass a JAX array of {', '.join(KV_DTYPES)}")


def _check_experts(x: Array, router: Array, gate_up: Array, down: Array) -> None:
    """Check that the shapes of the experts' weights match each other and the width of `x`."""
    width = x.shape[-1]
    count, inner = (gate_up.shape[0], gate_up.shape[-1]) if gate_up.ndim == 4 else ("E", "F")
    for name, array, axes, wanted in (
        ("gate_up", gate_up, "[E, D, 2, F]", (count, width, 2, inner)),
        ("router", router, "[E, D]", (count, width)),
        ("down", down, "[E, F, D]", (count, inner, width)),
    ):
        if array.shape != wanted:
            raise ValueError(
                f"experts: {name} has shape {list(array.shape)}, but must be {axes} = "
                f"[{', '.join(map(str, wanted))}]: transpose or reshape it"
            )
