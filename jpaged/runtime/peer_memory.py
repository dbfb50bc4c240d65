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

from jpaged.models.sharding import over, sharding_of
from pallas_kernels import Backend, exchange_header, exchange_words, select_backend
from pallas_kernels.all_reduce import EMPTY
from pallas_kernels.tuning import is_hopper

LONGEST_STEP = 240.0
"""Seconds after which what several devices do is taken for something that never ends: in a
collective each waits for the others as long as it takes, and nothing can break that off. Less than
a server waits for its engine's loop by default (300 s), so that it is told why."""

_LOOK = 2e-5  # seconds between two looks

_memories: list[jax.Array] = []
"""Exchange memories, 8 MiB a device, for good: when an engine is dropped, steps in flight still
store into its."""


def await_devices(arrays: Any) -> None:
    """Wait until arrays over several devices are computed.

    Raises:
        RuntimeError: they are not after `LONGEST_STEP` seconds; or computing one failed.
    """
    end = time.monotonic() + LONGEST_STEP
    for array in jax.tree.leaves(arrays):
        while not array.is_ready():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"a step has not ended after {LONGEST_STEP:g} s: one of the devices that share "
                    "the model has failed or hangs; end this process by force (SIGKILL or "
                    "os._exit, for an ordinary end waits for the device), and make a new engine "
                    "in another"
                )
            time.sleep(_LOOK)
        jax.block_until_ready(array)  # it is ready, but perhaps with an error


def header_shape(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """Of the devices' headers, side by side; None where there is no kernel."""
    words = exchange_words(mesh.size, Backend.TRITON)
    return None if words is None else over(mesh, jax.ShapeDtypeStruct((words[0],), jnp.int32), 0)


def can_exchange(devices: Sequence[Any], dtype: DTypeLike) -> bool:
    """Whether devices can sum rows of a dtype through each other's memory: Hopper GPUs of one host,
    each of which may store into every other one's memory, and bfloat16."""
    backend = select_backend(devices[0].platform)
    if backend is not Backend.TRITON or dtype != jnp.bfloat16:
        return False
    if exchange_words(len(devices), backend) is None:
        return False
    if not all(is_hopper(device.device_kind) for device in devices):
        return False
    places = [device.local_hardware_id for device in devices]
    return all(_reaches(a, b) for a in places for b in places if a != b)


class PeerMemory:
    """The exchange memories of a mesh's devices, and the headers that programs are given.

    Attributes:
        headers: int32, the devices' headers side by side.

    Args:
        mesh: The devices, of which `can_exchange` holds.
        most_polls: As of `pallas_kernels.exchange_header`; None for its own.
    """

    def __init__(self, mesh: Mesh, most_polls: int | None = None):
        words = exchange_words(mesh.size, Backend.TRITON)
        if words is None:
            raise ValueError(f"no memory to exchange through for {mesh.size} devices of {mesh}")
        shape, sharding = (mesh.size * words[1],), sharding_of(mesh, 0)
        filled = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.int32), out_shardings=sharding)
        memory = jax.block_until_ready(filled())
        _memories.append(memory)
        at = {it.device: it.data.unsafe_buffer_pointer() for it in memory.addressable_shards}
        addresses = [at[device] for device in mesh.devices.flat]
        limit = {} if most_polls is None else {"most_polls": most_polls}
        rows = [exchange_header(rank, addresses, **limit) for rank in range(mesh.size)]
        self.headers = jax.device_put(np.concatenate(rows), sharding)
        # A new array each time: JAX keeps what it has once read of one. Compiled now.
        self._read = jax.jit(lambda headers: headers * 1).lower(self.headers).compile()

    def check(self) -> None:
        """Look whether every device got all words it waited for, once all launched steps are done.

        Raises:
            RuntimeError: one did not, or hangs. What was exchanged since means nothing, and the
                memory is not to be used again.
        """
        headers = self._read(self.headers)
        await_devices(headers)
        lost = [shard for shard in headers.addressable_shards if np.asarray(shard.data)[0]]
        if lost:
            raise RuntimeError(
                f"{lost[0].device} waited in vain for the other devices that share the model: one "
                "of them has failed or lags by seconds; make a new engine in a new process"
            )


def _reaches(device: int, peer: int) -> bool:
    """Whether a GPU may store into the memory of another, by their CUDA ordinals."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    answer = ctypes.c_int(0)
    failed = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer)
    return not failed and bool(answer.value)
