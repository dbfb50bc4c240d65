"""Devices that share a model: the memory through which they sum, where each one's is, what is left
of it to see when a device does not answer, and how long they are waited for.

A kernel stores into another device's memory at its address (`pallas_kernels.all_reduce`). The
address is a number that programs are given, so the array behind it must stay where it is for as
long as they run: it is held here, and nothing donates it, copies it or sets it free.
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
"""Seconds after which what several devices do is taken for something that never ends: in a
collective each waits for the others as long as it takes, and nothing can break that off. Less than
a server waits for its engine's loop by default (300 s), so that it is told why."""

_POLL_INTERVAL_S = 2e-5  # seconds between two looks

_exchange_memories: list[jax.Array] = []
"""Exchange memories, 8 MiB a device, for good: when an engine is dropped, steps in flight still
store into its."""


def wait_for_devices(arrays: Any) -> None:
    """Wait until arrays over several devices are computed.

    Raises:
        RuntimeError: they are not after `MAX_STEP_S` seconds; or computing one failed.
    """
    end = time.monotonic() + MAX_STEP_S
    for array in jax.tree.leaves(arrays):
        while not array.is_ready():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"a step has not ended after {MAX_STEP_S:g} s: one of the devices that share "
                    "the model has failed or hangs; end this process by force (SIGKILL or "
                    "os._exit, for an ordinary end waits for the device), and make a new engine "
                    "in another"
                )
            time.sleep(_POLL_INTERVAL_S)
        jax.block_until_ready(array)  # it is ready, but perhaps with an error


def peer_header_shape(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """Of the devices' headers, side by side; None where there is no kernel."""
    words = exchange_word_counts(mesh.size, Backend.TRITON)
    return (
        None
        if words is None
        else global_shape_struct(mesh, jax.ShapeDtypeStruct((words[0],), jnp.int32), 0)
    )


def can_use_peer_memory(devices: Sequence[Any], dtype: DTypeLike) -> bool:
    """Whether devices can sum rows of a dtype through each other's memory: Hopper GPUs of one host,
    each of which may store into every other one's memory, and bfloat16."""
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
    """The exchange memories of a mesh's devices, and the headers that programs are given.

    Attributes:
        headers: int32, the devices' headers side by side.

    Args:
        mesh: The devices, of which `can_use_peer_memory` holds.
        max_polls: As of `pallas_kernels.make_exchange_header`; None for its own.
    """

    def __init__(self, mesh: Mesh, max_polls: int | None = None):
        words = exchange_word_counts(mesh.size, Backend.TRITON)
        if words is None:
            raise ValueError(f"no memory to exchange through for {mesh.size} devices of {mesh}")
        shape, sharding = (mesh.size * words[1],), axis_sharding(mesh, 0)
        filled = jax.jit(lambda: jnp.full(shape, EMPTY_WORD, jnp.int32), out_shardings=sharding)
        memory = jax.block_until_ready(filled())
        _exchange_memories.append(memory)
        at = {it.device: it.data.unsafe_buffer_pointer() for it in memory.addressable_shards}
        addresses = [at[device] for device in mesh.devices.flat]
        limit = {} if max_polls is None else {"max_polls": max_polls}
        rows = [make_exchange_header(rank, addresses, **limit) for rank in range(mesh.size)]
        self.headers = jax.device_put(np.concatenate(rows), sharding)
        # A new array each time: JAX keeps what it has once read of one. Compiled now.
        self._copy_headers = jax.jit(lambda headers: headers * 1).lower(self.headers).compile()

    def check_devices(self) -> None:
        """Look whether every device got all words it waited for, once all launched steps are done.

        Raises:
            RuntimeError: one did not, or hangs. What was exchanged since means nothing, and the
                memory is not to be used again.
        """
        headers = self._copy_headers(self.headers)
        wait_for_devices(headers)
        lost = [shard for shard in headers.addressable_shards if np.asarray(shard.data)[0]]
        if lost:
            raise RuntimeError(
                f"{lost[0].device} waited in vain for the other devices that share the model: one "
                "of them has failed or lags by seconds; make a new engine in a new process"
            )


def _can_access_peer(device: int, peer: int) -> bool:
    """Whether a GPU may store into the memory of another, by their CUDA ordinals."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int(0)
    failed = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer)
    return not failed and bool(answer.value)
