"""Argument checks that the ops' own are made of.

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
    check_rank(f"{name}.k", k, 4, "[P, S, K, H]")
    check_shape(f"{name}.v", v, k.shape, f"{name}.k's shape")
    if k.dtype not in DTYPES:
        raise TypeError(f"{name}.k has dtype {k.dtype}; make the pool bfloat16, float16 or float32")
    check_dtype(f"{name}.v", v, k.dtype, f"{name}.k's dtype")
    if not 1 <= k.shape[1] <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block size {k.shape[1]} ({name}.k.shape[1]) must be from 1 to {MAX_BLOCK_SIZE}"
        )
    if not k.shape[3]:
        raise ValueError(f"head size 0 ({name}.k.shape[3]) must be at least 1")


def check_rank(name, array, rank, axes):
    """The array has `rank` axes."""
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {axes}")


def check_shape(name, array, want, why):
    """It has the shape `want`, for the reason `why`."""
    if tuple(array.shape) != tuple(want):
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {tuple(want)} ({why})")


def check_dtype(name, array, want, why):
    """It has the dtype `want`."""
    if array.dtype != want:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {want} ({why})")


def check_scale(name, weight, dtype, why):
    """A norm's weight has the dtype of what it scales, or float32, in which norms compute."""
    if weight.dtype != jnp.float32:
        check_dtype(name, weight, dtype, f"{why}, or float32")


def check_float(name, array, rank, axes):
    """It has `rank` axes and a dtype that kernels compute in."""
    check_rank(name, array, rank, axes)
    if array.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or float32; cast it"
        )


def check_int32(name, array, rank, axes):
    """It has `rank` axes of int32."""
    check_rank(name, array, rank, axes)
    check_dtype(name, array, jnp.int32, "indices are int32; cast it first")


def check_partials(name, array, rank, axes, dtype):
    """Split-K partials: of the dtype of their sum, or float32."""
    check_float(name, array, rank, axes)
    if jnp.dtype(dtype) not in DTYPES or array.dtype not in (dtype, jnp.float32):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {dtype} or float32; cast it")
    if not array.shape[0]:
        raise ValueError(f"{name} has no partials; it must be {axes} with at least one")


def check_logits(logits):
    """Logits are float32 [B, V]."""
    check_rank("logits", logits, 2, "[B, V]")
    check_dtype("logits", logits, jnp.float32, "sampling computes in float32; cast it first")


def check_eps(name, eps):
    """What is added under a root is finite and not negative."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{name} is {eps}; it must be finite and not negative, as 1e-6")
