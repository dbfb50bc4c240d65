"""Serve a user's own model, which is written as plain JAX functions.

`JaxModel` describes the model. `forward` gets a `ModelStep`, whose `attend` writes keys and values
to the pool and computes attention. `plan_jax_model` checks the model and its parameters by tracing
the functions, and `JaxDecoder` adapts the model to the steps of the engine.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from jpaged.errors import format_count
from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from jpaged.models.live_weights import WriteFunction, check_all_finite
from jpaged.models.model_devices import ModelDevices, find_mesh, place_on_mesh, split_axis_of
from jpaged.models.model_ops import ModelOps
from jpaged.models.model_step import KV_DTYPES, LayerHeads, ModelStep
from jpaged.models.model_trace import (
    ModelDigests,
    TracedOps,
    TracedStep,
    check_batch_invariance,
)
from jpaged.models.sharding import without_mesh
from jpaged.models.sizes import JaxModelSizes
from pallas_kernels import Backend, LayerKV, select_backend

_TRACED_TOKENS = 8
"""Number of tokens with which `plan_jax_model` traces a model."""

_TRACED_LOGITS_ROWS = 3
"""Number of rows of hidden states with which `plan_jax_model` traces `logits`. It differs from
`_TRACED_TOKENS`, because the engine computes logits only for some tokens of a step."""


@dataclass(frozen=True)
class JaxModel:
    """A decoder-only model in plain JAX, which `Engine(model=..., params=...)` serves.

    The engine compiles the functions `forward` and `logits`, so both must be traceable, as for
    `jax.jit`. `docs/your_model.md` has an example.

    Attributes:
        forward: Function `forward(params, tokens, positions, step)` that returns the hidden states
            [T, D] of the tokens. `tokens` and `positions` are int32 [T]: the tokens of all
            sequences of a step, one sequence after another, and their positions from 0. For each
            layer, the function calls `step.attend` once (see `ModelStep`). Everything else that the
            function computes for a token must not depend on the other tokens.
        logits: Function `logits(params, hidden)` that returns the logits [R, V] for some rows [R,
            D] of the hidden states. If the function has a parameter `step`, the engine passes a
            `ModelOps` as this argument.
        num_layers: Number of layers that call `step.attend`.
        num_kv_heads: Number of KV heads: one int for all layers, or a sequence with one int per
            layer.
        head_size: Width of one head: one int for all layers, or a sequence with one int per layer.
        vocab_size: Number of logits per token (V).
        max_positions: Maximum number of tokens of a sequence that the model supports.
        eos_token_ids: Tokens that end an answer, in addition to the tokenizer's end token.

    Raises:
        TypeError, ValueError: A function is missing, or a size is invalid.
    """

    forward: Callable[..., Any]
    logits: Callable[..., Any]
    num_layers: int
    num_kv_heads: int | Sequence[int]
    head_size: int | Sequence[int]
    vocab_size: int
    max_positions: int
    eos_token_ids: Sequence[int] | int | None = ()

    def __post_init__(self):
        arguments = {"forward": "params, tokens, positions, step", "logits": "params, hidden"}
        for name, listed in arguments.items():
            function = getattr(self, name)
            if not callable(function):
                raise TypeError(
                    f"{name}={function!r} is not a function: pass a function {name}({listed})"
                )
            if isinstance(function, jax.stages.Wrapped):
                raise TypeError(
                    f"{name} is wrapped in jax.jit: pass the function without jax.jit, because the "
                    "engine compiles the function"
                )
        for name in ("num_layers", "vocab_size", "max_positions"):
            _check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "head_size"):
            per_layer = getattr(self, name)
            if not isinstance(per_layer, Sequence):
                per_layer = (per_layer,) * self.num_layers
            if len(per_layer) != self.num_layers:
                raise ValueError(
                    f"{name} has {format_count(len(per_layer), 'entry', 'entries')} for "
                    f"num_layers={self.num_layers}: pass one int, or one int per layer"
                )
            for index, value in enumerate(per_layer):
                _check_size(f"{name} of layer {index}", value)
            object.__setattr__(self, name, tuple(per_layer))
        object.__setattr__(self, "eos_token_ids", self.end_tokens)
        for token in self.end_tokens:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_ids has {token!r}: pass ints from 0 to {self.vocab_size - 1}"
                )

    def compute_logits(self, params: Any, hidden: Array, step: ModelOps) -> Any:
        """Call `logits`, and pass `step` if the function has a parameter `step`."""
        if _has_parameter(self.logits, "step"):
            return self.logits(params, hidden, step=step)
        return self.logits(params, hidden)

    @property
    def layers(self) -> tuple[LayerHeads, ...]:
        """Number and width of the KV heads in each layer."""
        sizes = zip(_as_tuple(self.num_kv_heads), _as_tuple(self.head_size), strict=True)
        return tuple(LayerHeads(*each) for each in sizes)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """`eos_token_ids` as a tuple. The user may have passed a single int or None."""
        eos = self.eos_token_ids
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @property
    def pool_heads(self) -> LayerHeads:
        """Number and width of the KV heads in each layer of the KV pool. All layers of the pool are
        equal, so both values are maxima over the layers of the model."""
        return LayerHeads(max(_as_tuple(self.num_kv_heads)), max(_as_tuple(self.head_size)))


def _as_tuple(per_layer: int | Sequence[int]) -> tuple[int, ...]:
    """Return one size per layer; an int stands for the same size in all layers."""
    return (per_layer,) if isinstance(per_layer, int) else tuple(per_layer)


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter `name`; False if its signature is unknown."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an int: pass an int, at least 1")
    if value < 1:
        raise ValueError(f"{name}={value}: pass an int, at least 1")


class JaxDecoder(nnx.Module):
    """Wrapper that gives a user's model the methods of `Decoder` that a step calls.

    Args:
        model: The model.
        sizes: Sizes of the model and of its pool.
        params: Parameters, a pytree of arrays.
        devices: Devices that split the parameters; None for a single device.
    """

    is_vocab_sharded = False

    def __init__(
        self,
        model: JaxModel,
        sizes: JaxModelSizes,
        params: Any,
        devices: ModelDevices | None = None,
    ):
        leaves, self.treedef = jax.tree.flatten(params)
        self.model, self.config, self.devices = model, sizes, devices
        self.leaves = nnx.List([nnx.Param(leaf) for leaf in leaves])

    @property
    def params(self) -> Any:
        """The parameters as the user's pytree."""
        return jax.tree.unflatten(self.treedef, [leaf[...] for leaf in self.leaves])

    def __call__(
        self,
        token_ids: Int32[Array, "T"],
        positions: Int32[Array, "T"],
        pool: tuple[LayerKV, ...],
        attention: AttentionInputs,
        run_layers: Callable[..., Any] | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerKV, ...]]:
        """Run `forward` on the tokens of a step, with the arguments of `Decoder.__call__`."""
        params = self.params
        step = ModelStep(self.model.layers, pool, attention, **self._step_options(params))
        hidden = self.model.forward(params, token_ids, positions, step)
        return self._replicate(hidden), step.take_pool()

    def logits(
        self, hidden: Float[Array, "R D"], backend: Backend = Backend.XLA
    ) -> Float32[Array, "R V"]:
        """Return the logits of the given rows of hidden states, in float32."""
        params = self.params
        ops = ModelOps(backend, **self._step_options(params))
        logits = self.model.compute_logits(params, hidden, ops).astype(jnp.float32)
        return self._replicate(logits)

    def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` on every device with complete arrays. The results
        must be the same on all devices."""
        return function if self.devices is None else self.devices.on_each_device(function)

    def _step_options(self, params: Any) -> dict[str, Any]:
        """Return keyword arguments for the constructors of `ModelStep` and `ModelOps`."""
        shard_runner = None if self.devices is None else self.devices.shard_runner(params)
        return {"batch_invariant": self.config.batch_invariant, "shard_runner": shard_runner}

    def _replicate(self, rows: jax.Array) -> jax.Array:
        """Constrain rows so that every device has a complete copy, and return them."""
        return rows if self.devices is None else self.devices.replicate(rows)

    def target_logprobs(
        self, hidden: Float[Array, "R D"], targets: Int32[Array, "R"], backend: Backend
    ) -> None:
        """Return None, because no kernel computes these log-probabilities for a user's model. The
        caller uses `logits` instead.
        """


StepModel = Decoder | JaxDecoder
"""A model that steps can compute."""


@dataclass(frozen=True)
class JaxModelPlan:
    """A user's model that has been checked.

    Attributes:
        config: Sizes of the model and of its pool.
        dtype: Dtype of the hidden states.
        abstract_model: The model with the user's arrays as parameters. (In a `ModelPlan`, this
            field has shapes and dtypes instead of arrays.)
    """

    config: JaxModelSizes
    dtype: jnp.dtype
    abstract_model: JaxDecoder

    def load(self) -> JaxDecoder:
        """Return the model. Its parameters are on the device already, so nothing is loaded."""
        return self.abstract_model

    @property
    def devices(self) -> list[Any]:
        """Devices of the parameters, in the order of the mesh."""
        if self.abstract_model.devices is not None:
            return [*self.abstract_model.devices.mesh.devices.flat]
        return [*jax.tree.leaves(self.abstract_model.params)[0].devices()]

    def with_kv_cache_dtype(self, dtype: str | None) -> "JaxModelPlan":
        """Return a copy of the plan, with `dtype` as the dtype of the KV pool. Return the plan
        itself if `dtype` is None."""
        if dtype is None:
            return self
        sizes = replace(self.config, kv_cache_dtype=dtype)
        found = self.abstract_model
        model = JaxDecoder(found.model, sizes, found.params, found.devices)
        return replace(self, config=sizes, abstract_model=model)

    def digests(self) -> ModelDigests:
        """Return a `ModelDigests`, which computes digests of the model's functions.

        The object keeps the shapes and dtypes of the parameters, but no arrays.
        """
        found = self.abstract_model
        shapes = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), found.params)
        return ModelDigests(found.model, self.config, shapes, self.dtype)

    @property
    def parameters(self) -> "JaxParameters":
        """Shapes, dtypes and devices of the parameters."""
        found = self.abstract_model
        shapes = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), found.params)
        return JaxParameters(found.model, self.config, shapes, self.devices[0], found.devices)


@dataclass(frozen=True)
class JaxParameters:
    """The structure that new parameters of a running engine must have.

    Attributes:
        model: The model.
        sizes: Sizes of the model and of its pool.
        shapes: Shapes and dtypes, as a pytree of `jax.ShapeDtypeStruct`.
        device: First device of the engine.
        devices: Devices that split the parameters; None for a single device.
    """

    model: JaxModel
    sizes: JaxModelSizes
    shapes: Any
    device: Any
    devices: ModelDevices | None = None

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names of the parameters that the engine shares with the caller, such as `params['w']`.

        The engine shares all parameters, because the caller owns the parameters' arrays. The order
        of the names is the order in which the model runner stores the parameters.
        """
        leaves = jax.tree.leaves_with_path(self.shapes)
        return tuple(f"params{jax.tree_util.keystr(path)}" for path, _ in leaves)

    def release(self, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return no parameters, so that the engine holds no references to the caller's arrays and
        the caller can free the arrays."""
        return ()

    def prepare(self, params: Any, *, check_finite: bool = False) -> WriteFunction:
        """Check new parameters, and return a function that returns the new parameters.

        The function ignores its argument, the old parameters.

        Args:
            params: The new parameters, which the engine uses without a copy.
            check_finite: Whether to refuse NaN and infinite values. The check waits for the device.

        Raises:
            TypeError, ValueError: The tree, or the shape, dtype, device or split of an array
                differs, or an array is not finite. The message names the first such array.
        """
        wanted, found = (
            {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
            for leaves in map(jax.tree.leaves_with_path, (self.shapes, params))
        )
        for problem, names in (
            ("missing", wanted.keys() - found.keys()),
            ("unknown", found.keys() - wanted.keys()),
        ):
            if names:
                raise ValueError(
                    f"params{min(names)} is {problem}: pass a tree with the keys of the engine's "
                    "params"
                )
        if jax.tree.structure(params) != jax.tree.structure(self.shapes):
            raise ValueError(
                f"params is {jax.tree.structure(params)}, but the engine was created with "
                f"{jax.tree.structure(self.shapes)}: pass a tree with the same containers"
            )
        arrays = _check_parameters(params, self.device, self.devices and self.devices.mesh)
        for path, leaf in jax.tree.leaves_with_path(arrays):
            name, spec = jax.tree_util.keystr(path), wanted[jax.tree_util.keystr(path)]
            if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
                raise ValueError(
                    f"params{name} is {leaf.dtype}{list(leaf.shape)}, but the engine was created "
                    f"with {spec.dtype}{list(spec.shape)}: pass the same shape and dtype"
                )
        self._check_split(arrays)
        named = {
            f"params{jax.tree_util.keystr(path)}": leaf
            for path, leaf in jax.tree.leaves_with_path(arrays)
        }
        if check_finite:
            with without_mesh():
                check_all_finite(named)
        leaves = tuple(jax.tree.leaves(nnx.state(JaxDecoder(self.model, self.sizes, arrays))))
        return lambda _: leaves

    def _check_split(self, arrays: Any) -> None:
        """Check that new parameters are split over the devices as the engine's parameters are."""
        if self.devices is None:
            return
        leaves = jax.tree.leaves_with_path(arrays)
        for (path, leaf), wanted in zip(leaves, self.devices.split_axes, strict=True):
            found = split_axis_of(leaf)
            if found != wanted:
                texts = [
                    "replicated" if axis is None else f"split along axis {axis}"
                    for axis in (found, wanted)
                ]
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {texts[0]}, but the engine was created "
                    f"with an array that is {texts[1]}: pass the same sharding"
                )


def plan_jax_model(
    model: JaxModel, params: Any, device: Any, *, batch_invariant: bool = False
) -> JaxModelPlan:
    """Check a user's model and its parameters, and return its sizes.

    The functions are traced with a few tokens, without computing anything. Every program of the
    engine traces them again.

    Args:
        model: The model.
        params: Parameters, a pytree of arrays on `device`, or on a mesh with one axis of several
            devices.
        device: Device of the engine, if the parameters are not on several devices.
        batch_invariant: Whether a token's bits must not depend on the other tokens of a step.

    Raises:
        TypeError, ValueError: A parameter is not an array on the device or the mesh. The number of
            devices does not divide the number of KV heads of a layer. A function does not return
            what `JaxModel` says. With `batch_invariant`, a function sums numbers without an
            operation of `ModelStep`. The message names the parameter, the layer or the function.
        Exception: An error of a function. A note says that jpaged was tracing the model.
    """
    mesh = find_mesh(params)
    arrays = _check_parameters(params, device, mesh)
    if not jax.tree.leaves(arrays):
        raise ValueError("params has no array: pass the parameters of the model")
    devices = None
    if mesh is not None:
        _check_kv_heads(model, mesh)
        devices = ModelDevices(mesh, tuple(map(split_axis_of, jax.tree.leaves(arrays))))
        device = mesh.devices.flat[0]
    backend = select_backend(device.platform)
    mode = {"batch_invariant": batch_invariant, "devices": devices}
    hidden, kv_dtype = _trace(model, arrays, backend, **mode)
    heads = model.pool_heads
    sizes = JaxModelSizes(
        vocab_size=model.vocab_size,
        hidden_size=hidden.shape[1],
        num_layers=model.num_layers,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        max_position_embeddings=model.max_positions,
        kv_cache_dtype=kv_dtype.name,
        eos_token_ids=model.end_tokens,
        batch_invariant=batch_invariant,
    )
    return JaxModelPlan(sizes, jnp.dtype(hidden.dtype), JaxDecoder(model, sizes, arrays, devices))


def _check_kv_heads(model: JaxModel, mesh: Mesh) -> None:
    """Check that the devices can split the KV heads of each layer."""
    count = mesh.size
    for index, (num_kv_heads, _) in enumerate(model.layers):
        if num_kv_heads % count:
            divisors = [it for it in range(1, count) if all(k % it == 0 for k, _ in model.layers)]
            raise ValueError(
                f"layer {index} has num_kv_heads={num_kv_heads}, which the {count} devices of "
                f"params cannot split: use {' or '.join(map(str, divisors))} "
                f"{'device' if divisors == [1] else 'devices'}, or repeat the KV heads in forward"
            )


def _check_parameters(params: Any, device: Any, mesh: Mesh | None) -> Any:
    """Apply `_check_parameter` to every leaf of a pytree."""
    return jax.tree.map_with_path(
        lambda path, leaf: _check_parameter(
            f"params{jax.tree_util.keystr(path)}", leaf, device, mesh
        ),
        params,
    )


def _check_parameter(name: str, leaf: Any, device: Any, mesh: Mesh | None) -> jax.Array:
    """Check a parameter, and return an array with the same data, without a copy.

    The returned array is on the devices of `mesh`, or on `device` if `mesh` is None.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        kind = f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__qualname__}"
        raise TypeError(
            f"{name} is a {kind}, not a JAX array: "
            "move arrays to the device with jax.device_put, and keep other values out of params"
        )
    if leaf.is_deleted():
        raise ValueError(
            f"{name} was deleted or donated to another function: pass arrays that exist, and do "
            "not donate them while an engine uses them"
        )
    devices = leaf.devices()
    if mesh is None and devices != {device}:
        found = (
            f"split over {len(devices)} devices"
            if len(devices) > 1
            else f"on {min(devices, key=str)}"
        )
        raise ValueError(
            f"{name} is {found}, but the engine runs on {device}: pass "
            "jax.device_put(params, jax.local_devices()[0])"
        )
    memory, default = leaf.sharding.memory_kind, device.default_memory().kind
    if memory not in (None, default):
        raise ValueError(
            f"{name} is in {memory} memory: pass jax.device_put(array, "
            f"array.sharding.with_memory_kind({default!r}))"
        )
    if mesh is not None:
        return place_on_mesh(name, leaf, mesh)
    # After `jax.device_put` from an explicit mesh to one device, the array's type still has the
    # mesh, and JAX refuses the array outside of the mesh's context.
    has_mesh = not jax.typeof(leaf).sharding.mesh.empty
    is_plain = isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding) and not has_mesh
    return leaf if is_plain else leaf.addressable_data(0)


def _trace(
    model: JaxModel,
    params: Any,
    backend: Backend,
    *,
    batch_invariant: bool,
    devices: ModelDevices | None,
) -> tuple[jax.ShapeDtypeStruct, jnp.dtype]:
    """Trace the functions `forward` and `logits` of a model. Check their results, and check the
    calls of `step.attend`.

    Returns:
        Shape of the hidden states of `_TRACED_TOKENS` tokens, and the dtype of the keys.
    """
    dtypes: dict[int, jnp.dtype] = {}

    def options(params: Any) -> dict[str, Any]:
        shard_runner = None if devices is None else devices.shard_runner(params)
        return {"batch_invariant": batch_invariant, "shard_runner": shard_runner}

    # Trace with `ShapeDtypeStruct`s, as the engine does when it compiles programs. An array may
    # have a weak type, which could change the dtypes of the results.
    params = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), params)

    def run_forward(params: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        step = TracedStep(model.layers, _TRACED_TOKENS, backend, **options(params))
        hidden = model.forward(params, tokens, positions, step)
        step.take_pool()
        dtypes.update(step.dtypes)
        return hidden

    def run_logits(params: Any, hidden: jax.Array) -> Any:
        return model.compute_logits(params, hidden, TracedOps(backend, **options(params)))

    tokens = jax.ShapeDtypeStruct((_TRACED_TOKENS,), jnp.int32)
    hidden, forward_trace = _trace_function("forward", run_forward, params, tokens, tokens)
    _check_result("forward", hidden, (_TRACED_TOKENS, None), "[T, D]")
    rows = jax.ShapeDtypeStruct((_TRACED_LOGITS_ROWS, hidden.shape[1]), hidden.dtype)
    logits, logits_trace = _trace_function("logits", run_logits, params, rows)
    _check_result("logits", logits, (_TRACED_LOGITS_ROWS, model.vocab_size), "[R, V]")
    for index, dtype in dtypes.items():
        if dtype != dtypes[0]:
            raise ValueError(
                f"attend for layer {index}: k is {dtype}, but k of layer 0 is {dtypes[0]}: cast "
                "the keys, because all layers of the pool have one dtype"
            )
    if batch_invariant:
        check_batch_invariance("forward", forward_trace)
        check_batch_invariance("logits", logits_trace)
    return hidden, jnp.dtype(dtypes[0])


def _trace_function(name: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Trace a function of the user's model; an error gets a note that names the function.

    Returns:
        Shapes of the result, and the trace (`jax.core.ClosedJaxpr`).

    Raises:
        ValueError: The function keeps a traced array after the function returns. The next trace of
            the function would fail.
    """
    has_returned = False

    def traced(*arguments: Any) -> Any:
        nonlocal has_returned
        result = function(*arguments)
        has_returned = True
        return result

    try:
        with jax.checking_leaks():
            trace, shapes = jax.make_jaxpr(traced, return_shape=True)(*arguments)
            return shapes, trace
    except Exception as error:
        # JAX raises TypeError if the function returns something other than arrays. If JAX raises
        # another error after the function has returned, the function has kept a traced array.
        if has_returned and not isinstance(error, TypeError):
            raise ValueError(
                f"{name} keeps an array between calls, for example in functools.cache: compute it "
                "outside, or pass it in params"
            ) from error
        error.add_note(f"jpaged was tracing {name}, which must be traceable as for jax.jit.")
        raise


def _check_result(name: str, found: Any, shape: tuple[int | None, ...], axes: str) -> None:
    """Check that a function returned one floating-point array. None in `shape` allows any size."""
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} returned a {type(found).__name__}: return one array {axes}")
    wanted = ", ".join("D" if size is None else str(size) for size in shape)
    fits = len(found.shape) == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, found.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} returned shape {list(found.shape)}, but must return {axes} = [{wanted}]"
        )
    if found.dtype.name not in KV_DTYPES:
        raise TypeError(
            f"{name} returned {found.dtype}: cast the result to one of {', '.join(KV_DTYPES)}"
        )
