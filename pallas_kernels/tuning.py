"""Properties of the target GPU, and the tables of tuned launch parameters.

An op's folder defines a frozen config class and pure functions that choose a config from shapes,
dtypes and the device. The file `tuned/<device kind>.json`, if it exists, overrides fields of the
chosen config: `{"decode": {"head_size=128,itemsize=2": {"tile_tokens": 64}}, ...}`. An empty entry
means that a sweep found nothing faster than the heuristic. The key `"swept"` records when and how
the sweep ran; no op reads it. No launch parameter is tuned while serving.
"""

import dataclasses
import functools
import json
from importlib import resources

import jax

from pallas_kernels.types import Backend, supports_fp8

# JAX's names of Hopper GPUs contain one of these strings.
HOPPER_GPUS = ("H100", "H200", "H800", "H20")
# A program on a Hopper GPU can have `MAX_SHARED_BYTES` bytes of shared memory.
MAX_SHARED_BYTES = 227 * 1024


def is_hopper(device_kind):
    """Return whether the GPU of that name is a Hopper GPU (compute capability 9.0)."""
    return any(name in device_kind for name in HOPPER_GPUS)


def has_fp8(backend):
    """Return whether the target GPU multiplies FP8 matrices; False without a GPU."""
    device = _target_device(backend)
    if getattr(device, "compute_capability", None) is None:  # unknown for abstract devices
        return is_hopper(device_kind(backend))
    return supports_fp8(device)


def device_kind(backend):
    """Return the name of the target GPU; an empty string without a GPU."""
    device = _target_device(backend)
    return "" if device is None else device.device_kind


def num_cores(backend):
    """Return the number of SMs of the target GPU; None if the number is unknown."""
    device = _target_device(backend)
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None)


def _target_device(backend):
    """Return the GPU to compile for; None unless the backend is `Backend.TRITON`.

    The GPU is the device of JAX's current abstract mesh. If no abstract device is set, the GPU is
    `jax.devices()[0]`.
    """
    if backend is not Backend.TRITON:
        return None
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def apply_tuned_config(op, head_size, itemsize, device_kind, config):
    """Return `config`, with the values of the device's tuned table in place of its own values."""
    entry = (
        _load_tuned_table(device_kind)
        .get(op, {})
        .get(f"head_size={head_size},itemsize={itemsize}", {})
    )
    return dataclasses.replace(config, **entry)


def has_tuned_table(device_kind):
    """Return whether launch parameters were tuned on the GPU of that name."""
    return bool(_load_tuned_table(device_kind))


@functools.lru_cache
def _load_tuned_table(device_kind):
    name = device_kind.replace(" ", "_").replace("/", "_")
    file = resources.files("pallas_kernels") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if name and file.is_file() else {}
