"""What the ops' launch parameters are chosen from: the device, and its table of swept ones.

Each op has a frozen config and pure functions that choose it by static facts, in its own folder.
`tuned/<device kind>.json`, where there is one, overrides fields of a choice:
`{"decode": {"head_size=128,itemsize=2": {"tile_tokens": 64}}, ...}`. An empty entry says that the
op was swept and the heuristic stays; `"swept"`, for readers only, says when, and with what. Nothing
is ever tuned while serving.
"""

import dataclasses
import functools
import json
from importlib import resources

import jax

from pallas_kernels.types import Backend, supports_fp8

HOPPER_GPUS = ("H100", "H200", "H800", "H20")  # in the names of devices of compute capability 9.0
MAX_SHARED_BYTES = 227 * 1024  # of a program on such a GPU


def is_hopper(device_kind):
    """Whether a GPU of that name is one."""
    return any(name in device_kind for name in HOPPER_GPUS)


def has_fp8(backend):
    """Whether the GPU traced for multiplies numbers in FP8."""
    device = _target_device(backend)
    if getattr(device, "compute_capability", None) is None:  # an abstract device's is not known
        return is_hopper(device_kind(backend))
    return supports_fp8(device)


def device_kind(backend):
    """The name of the GPU traced for, or nothing."""
    device = _target_device(backend)
    return "" if device is None else device.device_kind


def num_cores(backend):
    """Its SMs, where they are known."""
    device = _target_device(backend)
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None)


def _target_device(backend):
    """The GPU traced for: an abstract mesh's device where one is set, else the first one here."""
    if backend is not Backend.TRITON:
        return None
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def apply_tuned_config(op, head_size, itemsize, device_kind, config):
    """Override the heuristic's choice by the device's table."""
    entry = (
        _load_tuned_table(device_kind)
        .get(op, {})
        .get(f"head_size={head_size},itemsize={itemsize}", {})
    )
    return dataclasses.replace(config, **entry)


@functools.lru_cache
def _load_tuned_table(device_kind):
    name = device_kind.replace(" ", "_").replace("/", "_")
    file = resources.files("pallas_kernels") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if name and file.is_file() else {}
