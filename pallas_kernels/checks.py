"""Argument checks that the ops' own are made of.

They see static facts only (shapes, dtypes, Python numbers), so they cost nothing inside `jax.jit`
and hold for tracers. Each error names the parameter, its value and the remedy.
"""

import math

import jax.numpy as jnp

from pallas_kernels.types import FP8, FP8_PAIR_DTYPE, KVScales

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)  # what kernels compute in
POOL_DTYPES = (*FLOAT_DTYPES, FP8_PAIR_DTYPE)
MAX_BLOCK_SIZE = 256


def check_array(name, array, axes, dtypes=FLOAT_DTYPES, **sizes):
    """Refuse an array of other axes, of other sizes of these, or of another dtype.

    Args:
        name: of the parameter, for the error.
        array: what was given.
        axes: as "[T, 2, D]"; a number is a size.
        dtypes: those it may have, or the only one; None for any.
        sizes: of axes, by their names; an axis that has none here may have any size.

    Returns:
        `sizes` and those of the other axes.
    """
    names = axes.strip("[]").split(", ") if axes != "[]" else []
    known = sizes | {axis: int(axis) for axis in names if axis.isdigit()}
    found = dict(zip(names, array.shape, strict=False))
    if array.ndim != len(names) or any(known.get(axis, n) != n for axis, n in found.items()):
        given = ", ".join(f"{axis} = {n}" for axis, n in sizes.items() if axis in names)
        wanted = f"{axes} with {given}" if given else axes
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {wanted}")
    dtypes = dtypes if dtypes is None or isinstance(dtypes, tuple) else (dtypes,)
    if dtypes is not None and array.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(jnp.dtype(dtype).name for dtype in dtypes))
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {wanted}: cast it")
    return found | sizes


def check_pool(kv, name="kv"):
    """Refuse a pool of a wrong rank, dtype or block size, or of heads without elements; its sizes,
    H that of a head."""
    if kv.k.dtype == FP8:  # cast to integers they would be other numbers
        raise TypeError(
            f"{name}.k has dtype {kv.k.dtype}; give its numbers in pairs (`pack_fp8_pairs`)"
        )
    sizes = check_array(f"{name}.k", kv.k, "[P, S, K, H]", POOL_DTYPES)
    check_array(f"{name}.v", kv.v, "[P, S, K, H]", kv.k.dtype, **sizes)
    if not 1 <= sizes["S"] <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block size {sizes['S']} ({name}.k.shape[1]) must be from 1 to {MAX_BLOCK_SIZE}"
        )
    if not sizes["H"]:
        raise ValueError(f"head size 0 ({name}.k.shape[3]) must be at least 1")
    return sizes | {"H": kv.head_size}


def resolve_pool_scales(kv, scales):
    """The scales of a scaled pool, ones if none are given; None for one that takes none."""
    if not kv.is_scaled:
        if scales is not None:
            raise ValueError(
                f"scales are given for a pool of {kv.k.dtype}; only one in FP8 has them"
            )
        return None
    if scales is None:
        return KVScales(jnp.ones((1,), jnp.float32), jnp.ones((1,), jnp.float32))
    for name, scale in zip(("scales.k", "scales.v"), scales, strict=True):
        check_array(name, scale, "[1]", jnp.float32)
    return scales


def check_partials(name, array, axes, dtype, **sizes):
    """Refuse split-K partials that are neither of the dtype of their sum nor float32, or none."""
    if jnp.dtype(dtype) not in FLOAT_DTYPES:
        raise TypeError(f"{name}'s sum has dtype {dtype}; it must be bfloat16, float16 or float32")
    check_array(name, array, axes, (dtype, jnp.float32), **sizes)
    if not array.shape[0]:
        raise ValueError(f"{name} has no partials; it must be {axes} with at least one")


def check_eps(name, eps):
    """What is added under a root is finite and not negative."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{name} is {eps}; it must be finite and not negative, as 1e-6")
