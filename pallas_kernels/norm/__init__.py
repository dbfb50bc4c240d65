"""RMSNorm, alone and with the residual sum before it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels import checks
from pallas_kernels.gemm import check_static_scales, fp8
from pallas_kernels.gemm.xla import sum_partials
from pallas_kernels.norm import triton
from pallas_kernels.tuning import has_fp8
from pallas_kernels.types import Backend


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """x / rms(x) * weight over the last axis, in float32, x's dtype out (arXiv:1910.07467).

    Plain XLA everywhere: it makes one kernel of it.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    wide_weight = jnp.broadcast_to(weight.astype(jnp.float32), x.shape)
    return (wide * scale * wide_weight).astype(x.dtype)


def add_rms_norm(
    hidden: Float[Array, "T D"],
    update: Float[Array, "partials T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """`total = hidden + sum(update)`, both rounded; returns `rms_norm(total)` and total.

    The update comes as split-K partials (see `split_k_gemm`), of hidden's dtype or float32;
    so is the weight.

    Raises:
        ValueError: shapes that differ; an eps out of range.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    check_add_norm(hidden, update, weight, eps)
    backend = Backend(backend)
    if backend is Backend.XLA or not hidden.size:
        total = hidden + sum_partials(update, hidden.dtype)
        return rms_norm(total, weight, eps=eps), total
    return triton.add_rms_norm(
        hidden, update, weight, eps=eps, interpret=backend is Backend.INTERPRET
    )


def add_rms_norm_to_fp8(
    hidden: Float[Array, "T D"],
    update: Float[Array, "partials T D"],
    weight: Float[Array, "D"],
    static_scales: Float32[Array, "scales"] | None = None,
    *,
    eps: float,
    grouped: bool,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float32[Array, "T groups"], Float[Array, "T D"]]:
    """`add_rms_norm`, and `quantize_rows` of the normalized rows: their numbers in FP8, the scales
    of these (`grouped`: one for each `FP8_GROUP_SIZE` numbers of a row; with `static_scales`: for all rows the
    largest of those), and the total.

    Arguments and errors are those of `add_rms_norm` and `quantize_rows`.
    """
    check_add_norm(hidden, update, weight, eps)
    check_static_scales(static_scales, grouped=grouped)
    backend = Backend(backend)
    interpret = backend is Backend.INTERPRET
    if hidden.size and (interpret or has_fp8(backend)):
        options = {"eps": eps, "grouped": grouped, "interpret": interpret}
        return triton.add_rms_norm_to_fp8(hidden, update, weight, static_scales, **options)
    normed, total = add_rms_norm(hidden, update, weight, eps=eps, backend=backend)
    values, scale = fp8.quantize_rows(normed, static_scales, grouped=grouped)
    return values, scale, total


def check_add_norm(hidden, update, weight, eps):
    """Rows of one shape and dtype, and a weight a column."""
    sizes = checks.check_array("hidden", hidden, "[T, D]")
    checks.check_partials("update", update, "[partials, T, D]", hidden.dtype, **sizes)
    checks.check_array("weight", weight, "[D]", (hidden.dtype, jnp.float32), **sizes)
    checks.check_eps("eps", eps)
