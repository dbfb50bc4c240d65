"""Argument checks that several ops share.

The checks read only shapes, dtypes and Python numbers. Tracers therefore pass through the checks,
and a compiled `jax.jit` function runs without the checks.
"""

import math

import jax.numpy as jnp

from pallas_kernels.types import FP8, FP8_PAIR_DTYPE, KVScales

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)  # dtypes of activations and weights
POOL_DTYPES = (*FLOAT_DTYPES, FP8_PAIR_DTYPE)
MAX_BLOCK_SIZE = 256


def check_array(name, array, axes, dtypes=FLOAT_DTYPES, **sizes):
    """Check the shape and dtype of an array argument.

    Args:
        name: Name of the parameter, for the error message.
        array: The argument.
        axes: Names of the expected axes, such as "[T, 2, D]". A number is a required size.
        dtypes: The allowed dtype or a tuple of allowed dtypes; None allows any.
        sizes: Required sizes by axis name. An axis without a required size may have any size.

    Returns:
        A dict of the sizes of all named axes, including `sizes`.

    Raises:
        ValueError: The shape does not match.
        TypeError: The dtype is not allowed.
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
    """Check the shapes, dtypes and block size of a KV pool.

    Returns:
        A dict with the number of blocks P, the block size S, the number of KV heads K, and the head
        size H. The last axis of an FP8 pool has H / 2 elements.

    Raises:
        ValueError: The shapes differ, the block size is out of range, or the head size is 0.
        TypeError: The dtypes differ or are not supported.
    """
    # For an unpacked FP8 pool, `check_array` would say to cast the pool. A cast would be wrong: the
    # pool must be packed.
    if kv.k.dtype == FP8:
        raise TypeError(f"{name}.k has dtype {kv.k.dtype}: pack the pool with `pack_fp8_pairs`")
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
    """Check `scales`, and return the scales to use.

    For an FP8 pool, return `scales`, or scales of 1 if `scales` is None. For any other pool, return
    None.

    Raises:
        ValueError: The pool is not in FP8 but `scales` is set, or a scale has a wrong shape.
        TypeError: A scale is not float32.
    """
    if not kv.is_scaled:
        if scales is not None:
            raise ValueError(
                f"scales is set but the pool has dtype {kv.k.dtype}: omit scales or use an FP8 pool"
            )
        return None
    if scales is None:
        return KVScales(jnp.ones((1,), jnp.float32), jnp.ones((1,), jnp.float32))
    for name, scale in zip(("scales.k", "scales.v"), scales, strict=True):
        check_array(name, scale, "[1]", jnp.float32)
    return scales


def check_partials(name, array, axes, dtype, **sizes):
    """Check an array of split-K partials. Its dtype must be the dtype of the sum, or float32.

    Args:
        name: Name of the parameter, for the error message.
        array: The partials.
        axes: Names of the expected axes, as for `check_array`. The first axis counts the partials.
        dtype: Dtype of the sum.
        sizes: Required sizes by axis name.

    Raises:
        ValueError: The shape does not match, or the first axis is empty.
        TypeError: A dtype is not allowed.
    """
    if jnp.dtype(dtype) not in FLOAT_DTYPES:
        raise TypeError(
            f"the sum of {name} has dtype {dtype}; it must be bfloat16, float16 or float32"
        )
    check_array(name, array, axes, (dtype, jnp.float32), **sizes)
    if not array.shape[0]:
        raise ValueError(
            f"{name} has shape {array.shape} and so holds no partial sums: pass {axes} with at "
            "least one partial sum"
        )


def check_eps(name, eps):
    """Raise ValueError unless the epsilon of a norm is finite and at least 0."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{name} is {eps}: pass a finite number of at least 0, such as 1e-6")
