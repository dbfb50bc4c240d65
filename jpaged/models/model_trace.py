"""Check a user's functions for sums that depend on the batch, and compute digests of the
functions."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.models.model_step import OP_PREFIX, TracedOps, TracedStep
from jpaged.models.sizes import JaxModelSizes
from pallas_kernels import Backend

if TYPE_CHECKING:
    from jpaged.models.jax_model import JaxModel

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
        traced: Trace of the function (`jax.core.ClosedJaxpr`), with `TracedStep` or `TracedOps`.

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
    """Yield pairs: an equation of a jaxpr, and the equations that contain it, innermost first.

    An equation that contains a jaxpr, such as a jit call, is not yielded, but the equations inside
    are.
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
    """Return a text with the line of the user's code that called the first of `equations`.

    If JAX knows no such line for an equation, look at the next equation. This happens if JAX reuses
    the trace of one of its own functions.
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
        # The calls in the lowered text are the same for every backend. Use XLA's operations,
        # because JAX traces them fastest.
        self._mode = {"backend": Backend.XLA, "batch_invariant": sizes.batch_invariant}
        self._found: dict[tuple[str, int], str] = {}

    def digest(self, num_tokens: int | None, logits_rows: Iterable[int]) -> str:
        """Return the digest of the functions in one program.

        Args:
            num_tokens: Number of tokens of `forward`; None if the program does not call it.
            logits_rows: Every number of rows with which the program calls `logits`.
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
