"""RMSNorm, alone or fused with the residual addition before it.

The public ops check their arguments. `rms_norm` is plain XLA; the fused ops run triton.py on a GPU.
"""

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
    """Return x / rms(x) * weight over the last axis (RMSNorm).

    The op computes in float32 and returns x's dtype. Every backend runs plain XLA, which compiles
    the op to a single kernel. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
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
    """Add an update to the residual stream and normalize the sum with RMSNorm.

    Two results are rounded to the dtype of `hidden`: the sum of the update's partials, and the new
    residual stream.

    Args:
        hidden: Residual stream.
        update: Split-K partials of the update (see `split_k_gemm`), in the dtype of `hidden` or in
            float32.
        weight: Weight of the norm, in the dtype of `hidden` or in float32.
        eps: Epsilon of the norm.
        backend: The implementation to run.

    Returns:
        The normalized rows, and the new residual stream.

    Raises:
        ValueError: Shapes do not match, or `eps` is invalid (negative, infinite or NaN).
        TypeError: A dtype is not supported.
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
    """Run `add_rms_norm`, then quantize the normalized rows to FP8 as `quantize_rows` does.

    The arguments are documented at `add_rms_norm` and `quantize_rows`, which raise the same errors.

    Returns:
        The normalized rows in FP8, the scales [T, groups] of these rows, and the new residual
        stream.
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
    """Check the arguments of `add_rms_norm`, which documents the errors."""
    sizes = checks.check_array("hidden", hidden, "[T, D]")
    checks.check_partials("update", update, "[partials, T, D]", hidden.dtype, **sizes)
    checks.check_array("weight", weight, "[D]", (hidden.dtype, jnp.float32), **sizes)
    checks.check_eps("eps", eps)
