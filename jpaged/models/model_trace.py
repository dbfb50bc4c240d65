"""Trace a user's functions without a pool, to check them and to compute their digests.

`TracedStep` and `TracedOps` have the operations of `ModelStep` and `ModelOps`. In a trace, each of
their operations is one call whose target begins with `OP_PREFIX`. `check_batch_invariance` looks
for sums that depend on the batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from typing_extensions import override

from jpaged.models.attention import AttentionInputs
from jpaged.models.model_devices import Split
from jpaged.models.model_ops import ModelOps, Partials
from jpaged.models.model_step import LayerHeads, ModelStep
from jpaged.models.sizes import JaxModelSizes
from pallas_kernels import Backend, HeadNorms, LayerKV

if TYPE_CHECKING:
    from jpaged.models.jax_model import JaxModel

OP_PREFIX = "jpaged."
"""First characters of the targets of the operations' calls in a trace."""
_CONTAINERS = """
    call checkpoint closed_call cond custom_jvp_call custom_lin custom_vjp_call jit remat2 scan
    while
"""
"""Primitives that only run other primitives."""

_EXACT = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz convert_element_type copy cos cosh digamma div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p
    logistic lt max min mul name ne neg nextafter not or population_count pow reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor
    argmax argmin broadcast_in_dim concatenate cummax cummin device_put dynamic_slice
    dynamic_update_slice gather iota optimization_barrier pad random_bits random_fold_in
    random_seed random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_xor reshape rev scatter sharding_constraint slice sort split squeeze threefry2x32
    top_k transpose
"""
"""Primitives that add no numbers of an array: they compute each number from one number of each
argument, or move, choose or create numbers."""

_REMEDIES = {"dot_general": "step.project, step.gated_project or step.project_vocabulary"}


def check_batch_invariance(name: str, traced: Any) -> None:
    """Check that a traced function computes no floating-point sum except by jpaged's operations.

    XLA may order such a sum by the number of rows, so that its bits depend on the batch.

    Args:
        name: Name of the function: "forward" or "logits".
        traced: Trace of the function (`jax.core.ClosedJaxpr`). The function got a
            `TracedStep` or `TracedOps` as its argument `step`.

    Raises:
        ValueError: The function computes a sum in another way. The message names the primitive and
        its line.
    """
    exact = set(_EXACT.split())
    for equation, callers in _equations(traced.jaxpr):
        primitive = equation.primitive.name
        if primitive in exact or not _has_floats(equation):
            continue
        target = equation.params.get("target_name", "")
        if primitive == "ffi_call" and target.startswith(OP_PREFIX):
            continue
        remedy = _REMEDIES.get(primitive, "an operation of step, such as step.rms_norm")
        line = _user_line(equation, *callers)
        raise ValueError(
            f"batch_invariant=True: {name} calls {primitive} {line}, whose bits may depend on the "
            f"other tokens of a step: use {remedy}, or omit batch_invariant"
        )


def _equations(jaxpr: Any, callers: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each equation of a jaxpr, with a tuple of the equations that contain this equation.

    The tuple begins with the innermost containing equation. Equations of `_CONTAINERS`, such as jit
    calls, are not yielded: the generator yields the equations inside them instead.
    """
    containers = _CONTAINERS.split()
    for equation in jaxpr.eqns:
        if equation.primitive.name not in containers:
            yield equation, callers
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, (equation, *callers))


def _has_floats(equation: Any) -> bool:
    """Return whether an equation has a result of floating-point or complex numbers."""
    dtypes = [getattr(each.aval, "dtype", None) for each in equation.outvars]
    return any(it is None or jnp.issubdtype(it, jnp.inexact) for it in dtypes)


def _user_line(*equations: Any) -> str:
    """Return "at FILE:LINE" for the line of the user's code that caused an equation.

    Args:
        equations: The equation, then the equations that contain it, innermost first. If JAX reuses
            the trace of a JAX function, the equation has no line in the user's code. The first
            equation that has a line determines the result.
    """
    libraries = Path(jax.__file__).parent, Path(__file__).parents[1]
    for equation in equations:
        traceback = equation.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not any(Path(frame.file_name).is_relative_to(it) for it in libraries):
                return f"at {frame.file_name}:{frame.line_num}"
    return "at an unknown line"


class ModelDigests:
    """Computes digests of a user's functions. An equal digest shows that a stored program was
    compiled from the same functions.

    Each program has its own digest, because Python code may branch on the number of rows. For a
    digest, the functions are lowered with the row counts of the program, and the lowered text with
    its constants is hashed. Calls of jpaged's operations are not lowered to kernels, so a digest
    takes much less time than lowering the program.

    Args:
        model: The model.
        sizes: Sizes of the model and of its pool.
        params: Shapes and dtypes of the parameters, so that this object keeps no arrays in memory.
        dtype: Dtype of the hidden states.
    """

    def __init__(
        self,
        model: "JaxModel",
        sizes: JaxModelSizes,
        params: Any,
        dtype: jnp.dtype,
    ):
        self._model, self._sizes, self._params, self._dtype = model, sizes, params, dtype
        # In the lowered text, each of jpaged's operations is a call without an implementation. The
        # text is therefore the same for every backend. Use `Backend.XLA`, whose operations JAX
        # traces fastest.
        self._mode = {"backend": Backend.XLA, "batch_invariant": sizes.batch_invariant}
        self._found: dict[tuple[str, int], str] = {}

    def digest(self, num_tokens: int | None, logits_rows: Iterable[int]) -> str:
        """Return one digest of the user's `forward` and `logits`, traced for a program's shapes.

        Args:
            num_tokens: Number of tokens for which the program calls `forward`; None if the program
                does not call `forward`.
            logits_rows: Numbers of rows for which the program calls `logits`, without duplicates.
        """
        calls = [] if num_tokens is None else [("forward", num_tokens)]
        calls += [("logits", num_rows) for num_rows in sorted(logits_rows)]
        for name, num_rows in calls:
            if (name, num_rows) not in self._found:
                compute = self._digest_forward if name == "forward" else self._digest_logits
                self._found[name, num_rows] = compute(num_rows)
        return _digest(*(self._found[call] for call in calls))

    def _digest_forward(self, num_tokens: int) -> str:
        def forward(params: Any, tokens: jax.Array, positions: jax.Array) -> Any:
            step = TracedStep(self._model.layers, num_tokens, **self._mode)
            return self._model.forward(params, tokens, positions, step)

        tokens = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
        return _lowered_digest(forward, self._params, tokens, tokens)

    def _digest_logits(self, num_rows: int) -> str:
        def logits(params: Any, hidden: jax.Array) -> Any:
            return self._model.compute_logits(params, hidden, TracedOps(**self._mode))

        hidden = jax.ShapeDtypeStruct((num_rows, self._sizes.hidden_size), self._dtype)
        return _lowered_digest(logits, self._params, hidden)


def _lowered_digest(function: Any, *arguments: Any) -> str:
    """Return a digest of a function's lowered text.

    Unused parameters are kept, because the text names parameters by their positions only.
    """
    return _digest(jax.jit(function, keep_unused=True).lower(*arguments).as_text())


def _digest(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


class TracedOps(ModelOps):
    """Operations that appear as single calls in a trace.

    The first call of an operation with given shapes also traces the operation's kernels, to check
    the arguments.
    """

    def __init__(self, backend: Backend, **mode: Any):
        ModelOps.__init__(self, backend, **mode)
        self._outputs: dict[Any, Any] = {}

    @override
    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        *arrays: Any,
        split: Split | None,
        **options: Any,
    ) -> Any:
        run, (leaves, tree) = partial(super()._call, split=split), jax.tree.flatten(arrays)
        shapes = tuple((it.shape, it.dtype) for it in leaves)
        key = name, tree, shapes, split, tuple(sorted(options.items()))
        if key not in self._outputs:
            # In JAX 0.11.2, Mosaic GPU keeps traced references of its kernels. The check for leaked
            # tracers would report them as arrays that the user's function keeps.
            with jax.check_tracer_leaks(False):
                outputs = jax.eval_shape(lambda *it: run(name, function, *it, **options), *arrays)
            self._outputs[key] = outputs
        return _mark_call(name, self._outputs[key], arrays, options)


class TracedStep(TracedOps, ModelStep):
    """A step without a pool, for tracing `forward` with a given number of tokens.

    Attributes:
        dtypes: Maps the index of each layer for which `forward` called `attend` or `rope_attend` to
            the dtype of K.
    """

    def __init__(
        self,
        layers: Sequence[LayerHeads],
        num_tokens: int,
        backend: Backend = Backend.XLA,
        **mode: Any,
    ):
        one = jnp.zeros((1,), jnp.int32)
        slots = jnp.zeros((num_tokens,), jnp.int32)
        attention = AttentionInputs(one[None], one, slots, None, backend)
        ModelStep.__init__(self, layers, (), attention, **mode)
        self._outputs = {}
        self.dtypes: dict[int, jnp.dtype] = {}

    @override
    def _attend(
        self, index: int, q: Array, k: Array, v: Array, options: dict[str, Any]
    ) -> tuple[Array, LayerKV]:
        return self._mark_attention("attend", index, q, k.dtype, (q, k, v), options)

    @override
    def _rope_attend(
        self,
        index: int,
        qkv: Partials,
        angles: tuple[Array, Array] | None,
        norms: HeadNorms | None,
        options: dict[str, Any],
    ) -> tuple[Array, LayerKV]:
        num_heads = qkv.values.shape[2] - 2 * self._layers[index].num_kv_heads
        shape = self._num_tokens, num_heads, qkv.values.shape[3]
        output = jax.ShapeDtypeStruct(shape, qkv.dtype)
        arrays, eps = (qkv.values, angles, norms and norms[:2]), norms and norms.eps
        options = {**options, "eps": eps}
        dtype = jnp.dtype(qkv.dtype)
        return self._mark_attention("rope_attend", index, output, dtype, arrays, options)

    def _mark_attention(
        self, name: str, index: int, output: Any, dtype: Any, arrays: Any, options: dict[str, Any]
    ) -> tuple[Array, LayerKV]:
        self.dtypes[index] = dtype
        empty = jnp.zeros((0, 1, *self._layers[index]), dtype)
        return _mark_call(name, output, arrays, {"layer": index, **options}), LayerKV(empty, empty)


def _mark_call(name: str, outputs: Any, arrays: Any, options: dict[str, Any]) -> Any:
    """Add a single call for an operation to the trace, and return the call's results.

    The call has the operation's options as an attribute. No code implements the call, so the trace
    can be examined but not executed.
    """
    leaves, tree = jax.tree.flatten(outputs)
    inputs, input_tree = jax.tree.flatten(arrays)
    shapes = [jax.ShapeDtypeStruct(it.shape, it.dtype) for it in leaves]
    call = jax.ffi.ffi_call(OP_PREFIX + name, shapes, vmap_method="broadcast_all")
    results = call(*inputs, options=repr((sorted(options.items()), str(input_tree))))
    return jax.tree.unflatten(tree, results)
