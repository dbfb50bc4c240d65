"""Memory for all-reduces between tensor-parallel devices, and a function that waits with a time
limit.

An all-reduce kernel stores data in an array on another device (`pallas_kernels.all_reduce`). This
array is called the exchange memory of the other device. Programs receive the address of the array
as a number, so the array must stay allocated as long as programs run. This module holds the arrays
of all devices: no other code may donate, copy or free the arrays.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jpaged.models.sharding import axis_sharding, global_shape_struct
from pallas_kernels import Backend, exchange_word_counts, make_exchange_header, select_backend
from pallas_kernels.all_reduce import EMPTY_WORD
from pallas_kernels.tuning import is_hopper

MAX_STEP_S = 240.0
"""Seconds after which a step on several devices is assumed to hang. In a collective, each device
waits for the others without a limit, and the wait cannot be cancelled. The server has a limit for
its engine loop, by default 300 s. `MAX_STEP_S` is lower, so that the server reports the error of
`wait_for_devices`, which names the cause.
"""

_POLL_INTERVAL_S = 2e-5

_exchange_memories: list[jax.Array] = []
"""Arrays through which the all-reduce kernels of all engines exchange data, 8 MiB per device. The
arrays are never freed: steps in flight still write to the arrays of an engine that was dropped."""


def wait_for_devices(arrays: Any) -> None:
    """Wait until arrays on several devices are computed.

    Args:
        arrays: A tree of arrays.

    Raises:
        RuntimeError: The arrays are not computed after `MAX_STEP_S` seconds, or computing an array
            failed.
    """
    end = time.monotonic() + MAX_STEP_S
    for array in jax.tree.leaves(arrays):
        while not array.is_ready():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"a step has not ended after {MAX_STEP_S:g} s: one of the tensor-parallel "
                    "devices has failed or hangs; kill this process (by SIGKILL or os._exit, "
                    "because a normal exit waits for the device), and create a new engine in a "
                    "new process"
                )
            time.sleep(_POLL_INTERVAL_S)
        jax.block_until_ready(array)  # JAX raises an exception if computing the array failed


def peer_header_shape(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """Return the shape of `PeerMemory.headers` for a mesh.

    Each device has a header: an int array that contains the addresses of the arrays through which
    the devices exchange data. Return None if no all-reduce kernel supports the mesh's number of
    devices.
    """
    words = exchange_word_counts(mesh.size, Backend.TRITON)
    return (
        None
        if words is None
        else global_shape_struct(mesh, jax.ShapeDtypeStruct((words[0],), jnp.int32), 0)
    )


def can_use_peer_memory(devices: Sequence[Any], dtype: DTypeLike) -> bool:
    """Return whether devices can all-reduce rows of `dtype` through each other's memory.

    The dtype must be bfloat16. The devices must be Hopper GPUs of one host, and every GPU must be
    able to store into the memory of every other GPU.
    """
    backend = select_backend(devices[0].platform)
    if backend is not Backend.TRITON or dtype != jnp.bfloat16:
        return False
    if exchange_word_counts(len(devices), backend) is None:
        return False
    if not all(is_hopper(device.device_kind) for device in devices):
        return False
    ordinals = [device.local_hardware_id for device in devices]
    return all(_can_access_peer(a, b) for a in ordinals for b in ordinals if a != b)


class PeerMemory:
    """Memory on each device of a mesh, through which all-reduce kernels exchange data.

    Each device has a header, an int array that programs receive as an argument. A header contains
    the addresses of the exchange memory of all devices.

    Attributes:
        headers: Headers of all devices in one int32 array. The array is sharded: each device holds
            the header for that device.

    Args:
        mesh: Devices for which `can_use_peer_memory` is true.
        max_polls: Number of polls after which a device stops waiting for another device; None for
            the default of `pallas_kernels.make_exchange_header`.
    """

    def __init__(self, mesh: Mesh, max_polls: int | None = None):
        words = exchange_word_counts(mesh.size, Backend.TRITON)
        if words is None:
            raise ValueError(
                f"no peer memory for {mesh.size} devices ({mesh}): use XLA's all-reduce"
            )
        shape, sharding = (mesh.size * words[1],), axis_sharding(mesh, 0)
        filled = jax.jit(lambda: jnp.full(shape, EMPTY_WORD, jnp.int32), out_shardings=sharding)
        memory = jax.block_until_ready(filled())
        _exchange_memories.append(memory)
        at = {it.device: it.data.unsafe_buffer_pointer() for it in memory.addressable_shards}
        addresses = [at[device] for device in mesh.devices.flat]
        limit = {} if max_polls is None else {"max_polls": max_polls}
        rows = [make_exchange_header(rank, addresses, **limit) for rank in range(mesh.size)]
        self.headers = jax.device_put(np.concatenate(rows), sharding)
        # `check_devices` must copy the headers before it reads their values, because JAX caches
        # values that the host has read. Compile the copy function in the constructor, because a
        # running engine must not compile.
        self._copy_headers = jax.jit(lambda headers: headers * 1).lower(self.headers).compile()

    def check_devices(self) -> None:
        """Check that each device received all data from the other devices.

        The method first waits until all launched steps are done.

        Raises:
            RuntimeError: A device did not receive data in time, or hangs. The results of later
                all-reduces are invalid, and the memory must not be used again.
        """
        headers = self._copy_headers(self.headers)
        wait_for_devices(headers)
        lost = [shard for shard in headers.addressable_shards if np.asarray(shard.data)[0]]
        if lost:
            raise RuntimeError(
                f"{lost[0].device} received no data from another tensor-parallel device: one of "
                "the devices has failed or is several seconds late; create a new engine in a new "
                "process"
            )


def _can_access_peer(device: int, peer: int) -> bool:
    """Return whether a GPU can store into the memory of another GPU. Both arguments are CUDA
    ordinals."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int(0)
    failed = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer)
    return not failed and bool(answer.value)
