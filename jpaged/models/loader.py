"""From a checkpoint folder to a model with its parameters on the device.

Nothing is read before the headers have been checked against the model (`weight_plan`). Then, file
by file, the tensors go to the device in slabs, where they are transposed, cast and written in place
into their (possibly fused) parameter. A file is mapped for one slab at a time. So the host holds a
few slabs, however large a file or a parameter is and wherever the pieces of a fused one lie.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.checkpoint import (
    SUPPORTED_DTYPES,
    CheckpointError,
    open_tensors,
    read_config,
    read_tensors,
    resolve_checkpoint,
)
from jpaged.models.config import ModelConfig
from jpaged.models.registry import model_class
from jpaged.models.weight_plan import Placement, Specs, plan_weights

__all__ = ["CheckpointError", "load_model", "read_config", "resolve_checkpoint"]

LOAD_FORMATS = ("auto", "safetensors", "dummy")
SLAB_BYTES = 64 << 20
_DUMMY_STD = 0.02


def load_model(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    load_format: str = "auto",
    seed: int = 0,
) -> nnx.Module:
    """The config's model with its parameters, in `dtype`, on the default device.

    Args:
        folder: checkpoint folder or hub id; not looked at when `load_format` is "dummy".
        config: the model's config; picks the family.
        dtype: float32, float16 or bfloat16.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" makes random weights on
            the device, the same ones for the same `seed`.
        seed: of the dummy weights.

    Raises:
        CheckpointError: the checkpoint is missing, broken or does not fit the model exactly.
        ValueError: `dtype` or `load_format` is not one of the above.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r} is unknown; use one of {LOAD_FORMATS}.")
    if jnp.dtype(dtype) not in SUPPORTED_DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is unsupported; use float32, float16 or bfloat16.")
    family = model_class(config)
    graphdef, state = nnx.split(model_shapes(config, dtype))
    variables = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    specs = {name: leaf.get_value() for name, (_, leaf) in variables.items()}
    if load_format == "dummy":
        arrays = {name: _dummy_array(name, spec, seed) for name, spec in specs.items()}
    else:
        tensors = read_tensors(resolve_checkpoint(folder))
        arrays = _read_arrays(plan_weights(tensors, family.weight_rules(config), specs), specs)
    filled = [(path, leaf.replace(arrays[name])) for name, (path, leaf) in variables.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def model_shapes(config: ModelConfig, dtype: DTypeLike) -> nnx.Module:
    """The config's model with shapes in its parameters' places."""
    return nnx.eval_shape(lambda: model_class(config)(config, dtype=dtype))


def _read_arrays(placements: Iterable[Placement], specs: Specs) -> dict[str, jax.Array]:
    """The parameters by path, read in the order of the placements, which is that of the files."""
    arrays: dict[str, jax.Array] = {}
    for placement in placements:
        path = placement.path
        if path not in arrays:
            arrays[path] = jnp.zeros(specs[path].shape, specs[path].dtype)
        for start, rows in _slabs(placement):
            # No name for the slab: it would live on while the next one is read.
            param = _write_slab(arrays[path], _read_slab(placement, rows), start, placement.order)
            # Before the next slab: running ahead of the device would gather slabs on the host.
            arrays[path] = param.block_until_ready()
    return arrays


def _read_slab(placement: Placement, rows: slice) -> np.ndarray:
    """These rows of a tensor, its axes split as in the parameter but in the order of the file."""
    shape = [placement.shape[axis] for axis in placement.order[1:]]
    with open_tensors(placement.tensor.file) as opened:  # closing it gives back the pages just read
        return opened.get_slice(placement.tensor.name)[rows].reshape(-1, *shape)


def _slabs(placement: Placement) -> Iterator[tuple[np.ndarray, slice]]:
    """Cut a piece into slabs of up to SLAB_BYTES, but at least one row of its slowest axis.

    Yields:
        The slab's start in the parameter (int32, one entry an axis), and its rows in the file.
    """
    tensor, slowest, size = placement.tensor, placement.order[0], math.prod(placement.shape)
    row_size, file_row_size = size // placement.shape[slowest], size // tensor.shape[0]
    unit = math.lcm(row_size, file_row_size)  # where a row of the piece and one of the file end
    step = max(1, SLAB_BYTES // (unit * SUPPORTED_DTYPES[tensor.dtype].itemsize)) * unit
    for first in range(0, size, step):
        start = np.zeros(len(placement.shape), np.int32)
        start[placement.axis] = placement.start
        start[slowest] += first // row_size
        yield start, slice(first // file_row_size, min(first + step, size) // file_row_size)


@partial(jax.jit, static_argnames="order", donate_argnames="param")
def _write_slab(
    param: jax.Array, slab: jax.Array, start: jax.Array, order: tuple[int, ...]
) -> jax.Array:
    slab = jnp.transpose(slab, tuple(map(order.index, range(len(order))))).astype(param.dtype)
    return jax.lax.dynamic_update_slice(param, slab, list(start))


def _dummy_array(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Random weights made on the device, ones for the scales of norms.

    The values depend on the seed and the parameter's path alone.
    """
    if len(spec.shape) == 1 and not path.endswith("bias"):  # other vectors are norms' scales
        return jnp.ones(spec.shape, spec.dtype)
    path_id = np.uint32(zlib.crc32(path.encode()))
    return _random(np.uint32(seed % 2**32), path_id, shape=spec.shape, dtype=spec.dtype)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _random(
    seed: jax.Array, path_id: jax.Array, *, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Nearly normal numbers: each the sum of the four bytes of one hash.

    Purely element-wise, so it compiles to one kernel and needs no workspace; `jax.random.normal`
    takes up to eight times the parameter's own size, which a device full of weights does not have.
    """
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    key = jnp.broadcast_to(_hash(path_id ^ _hash(seed)), shape)
    bits = _hash(_hash(index) ^ key)
    byte_sum = sum((bits >> np.uint32(shift)) & np.uint32(255) for shift in (0, 8, 16, 24))
    centred = jnp.asarray(byte_sum, jnp.float32) - np.float32(4 * 255 / 2)
    return (centred * np.float32(_DUMMY_STD / math.sqrt(4 * (256**2 - 1) / 12))).astype(dtype)


def _hash(x: jax.Array) -> jax.Array:
    """The 32-bit integer hash lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
